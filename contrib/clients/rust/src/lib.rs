//! A client of the message bus sbus, to be copied.  It needs the crate socket2
//! with its feature `all`, as the standard library has no SEQPACKET sockets.
//!
//!     let mut bus = sbus::Bus::connect(None)?;
//!     bus.subscribe(b"sensors/")?;
//!     bus.publish(b"sensors/1", b"21.5")?;
//!     while let Some(message) = bus.receive(None)? {
//!         println!("{message:?}");
//!     }
//!
//! A call that fails returns an `io::Error`, of the kind `BrokenPipe` if the
//! bus has closed, and `TimedOut` if nothing came in time.
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{Error, ErrorKind::*, Read, Result};
use std::os::unix::{ffi::*, fs::MetadataExt};
use std::time::{Duration, Instant};
use std::{collections::VecDeque, env, ffi::OsString, fs, path::Path, str};

const PACKET_MAX: usize = 409_600;
const WHOAMI: &[u8] = b"!/cred/whoami";
const ABSTRACT: &[u8] = b"/dev/unix/abstract/";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Whether the server itself has sent it.
    pub is_control: bool,
    pub key: Vec<u8>,
    pub payload: Vec<u8>,
}

pub struct Bus {
    socket: Socket,
    buffer: Vec<u8>,
    /// What came before an answer [CLIENT-8].
    kept: VecDeque<Message>,
    /// The answers to all requests begin so; NUL before there are any.
    reply_keys: Vec<u8>,
    requests: u64,
}

type Timeout = Option<Duration>;
type End = Option<Instant>;

fn invalid(text: &str) -> Error {
    Error::new(InvalidInput, text)
}

// ---- Where the bus is [ADDR-1]

/// Whether a directory is a user's, and its mode has none of these bits.
fn is_of(uid: u32, status: Result<fs::Metadata>, bits: u32) -> bool {
    status.map_or(false, |status| {
        status.is_dir() && status.uid() == uid && status.mode() & bits == 0
    })
}

fn default_address() -> Result<OsString> {
    let given = env::var_os("SBUS_ADDRESS");
    if let Some(given) = given.filter(|text| text != "") {
        return Ok(given);
    }
    let uid = fs::metadata("/proc/self")?.uid();
    if uid == 0 {
        return Ok("/run/sbus.socket".into());
    }

    let runtime = env::var_os("XDG_RUNTIME_DIR").unwrap_or_default();
    for directory in [runtime, format!("/run/user/{uid}").into()] {
        let directory = Path::new(&directory);
        if directory.is_absolute() && is_of(uid, directory.metadata(), 0o22) {
            return Ok(directory.join("sbus.socket").into());
        }
    }

    // Anybody could have made this one, and so it must be no link
    let directory = format!("/tmp/sbus-{uid}");
    if is_of(uid, fs::symlink_metadata(&directory), 0o77) {
        return Ok(format!("{directory}/sbus.socket").into());
    }
    Err(invalid("no directory for a bus is yours alone"))
}

/// Return an address as the kernel knows it.
fn socket_name(address: OsString) -> Result<OsString> {
    let Some(digits) = address.as_bytes().strip_prefix(ABSTRACT) else {
        return Ok(address);
    };
    let byte = |pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
    let mut name = bytes.unwrap_or_default();
    if name.first() != Some(&0) || name.len() > 108 {
        return Err(invalid("an abstract name begins with 00"));
    }
    name.resize(108, 0); // [ADDR-4]
    Ok(OsString::from_vec(name))
}

impl Bus {
    /// Connect to an address, or to the default one.
    pub fn connect(address: Option<OsString>) -> Result<Bus> {
        let address = address.map_or_else(default_address, Ok)?;
        let name = SockAddr::unix(socket_name(address)?)?;
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None)?;

        // The kernel doubles it, and so the largest packet fits [CLIENT-3]
        socket.set_send_buffer_size(PACKET_MAX / 2 + 32)?;
        socket.connect(&name)?;
        let buffer = vec![0; PACKET_MAX + 1];
        let (kept, reply_keys) = (VecDeque::new(), vec![0]);
        Ok(Bus { socket, buffer, kept, reply_keys, requests: 0 })
    }

    // ---- What is sent

    /// Send a packet by one call, which waits for a busy bus [CLIENT-3].
    fn send(&self, kind: &[u8], key: &[u8], rest: &[&[u8]]) -> Result<()> {
        let packet = [kind, key, &rest.concat()].concat();
        if key.contains(&0) || packet.len() > PACKET_MAX {
            return Err(invalid("a packet is too large, or its key has NUL"));
        }
        loop {
            match self.socket.send(&packet).map_err(|error| error.kind()) {
                Ok(_) => return Ok(()),
                Err(Interrupted) => {}
                // What came before can still be received [CLIENT-6]
                Err(ConnectionReset) => return Err(BrokenPipe.into()),
                Err(kind) => return Err(kind.into()),
            }
        }
    }

    pub fn subscribe(&self, pattern: &[u8]) -> Result<()> {
        self.send(b"SUB ", pattern, &[])
    }

    pub fn unsubscribe(&self, pattern: &[u8]) -> Result<()> {
        self.send(b"UNSUB ", pattern, &[])
    }

    pub fn publish(&self, key: &[u8], payload: &[u8]) -> Result<()> {
        self.send(b"MSG ", key, &[b"\0", payload])
    }

    // ---- What is received

    /// Return the next packet of the socket, or None at the end.
    fn read(&mut self, end: End) -> Result<Option<Message>> {
        loop {
            let left = end.map(|end| end - Instant::now()); // 0 if it is past
            let left = left.map(|left| left.max(Duration::from_micros(1)));
            self.socket.set_read_timeout(left)?;
            let outcome = self.socket.read(&mut self.buffer);
            match outcome.map_err(|error| error.kind()) {
                Ok(0) => return Ok(None),
                // What fills the buffer was cut [CLIENT-5]
                Ok(size) if size > PACKET_MAX => {
                    return Err(InvalidData.into())
                }
                Ok(size) => return Ok(Some(parse(&self.buffer[..size]))),
                // A reset comes once, before the last packets [CLIENT-6]
                Err(ConnectionReset | Interrupted) => {}
                Err(WouldBlock) => return Err(TimedOut.into()),
                Err(kind) => return Err(kind.into()),
            }
        }
    }

    /// Return the next message, or None if the bus has closed.
    pub fn receive(&mut self, timeout: Timeout) -> Result<Option<Message>> {
        if let Some(message) = self.kept.pop_front() {
            return Ok(Some(message));
        }
        let end = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            match self.read(end)? {
                // An answer that comes too late
                Some(got) if got.key.starts_with(&self.reply_keys) => {}
                outcome => return Ok(outcome),
            }
        }
    }

    /// Return the answer under a key, and keep what comes before [CLIENT-8].
    fn answer(&mut self, key: &[u8], end: End) -> Result<Message> {
        while let Some(message) = self.read(end)? {
            let stem = message.key.strip_suffix(b"/failed");
            let is_same = stem.unwrap_or(&message.key) == key;
            if is_same && message.is_control == (key == WHOAMI) {
                return Ok(message);
            }
            if !message.key.starts_with(&self.reply_keys) {
                self.kept.push_back(message);
            }
        }
        Err(BrokenPipe.into())
    }

    /// Return who this client is.  When the answer comes, the server has done
    /// all that was sent before [PKT-5].
    pub fn whoami(&mut self, timeout: Timeout) -> Result<Vec<u8>> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        // If the bus has closed, what it sent before is still to be kept
        let _ = self.send(b"CMSG ", WHOAMI, &[]);
        Ok(self.answer(WHOAMI, end)?.payload)
    }

    // ---- Requests, of which the server knows nothing

    /// Ask the clients that have subscribed to a key; return the first answer.
    pub fn request(
        &mut self,
        key: &[u8],
        question: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let end = Instant::now() + timeout;
        if self.requests == 0 {
            let mut random = [0; 16]; // so that nobody can guess the keys
            fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
            let secret = format!("/{:032x}/", u128::from_ne_bytes(random));
            let own = self.whoami(Some(timeout))?;
            self.reply_keys = [&own, secret.as_bytes()].concat();
            self.subscribe(&self.reply_keys)?;
        }

        self.requests += 1;
        let mut reply_key = self.reply_keys.clone();
        reply_key.extend(self.requests.to_string().bytes());
        self.send(b"MSG ", key, &[b"\0", &reply_key, b"\0", question])?;
        let answer = self.answer(&reply_key, Some(end))?;
        if answer.key == reply_key {
            return Ok(answer.payload);
        }
        Err(Error::new(Other, String::from_utf8_lossy(&answer.payload)))
    }

    /// Answer a message whose payload is a key for the answer, NUL, and a
    /// question.
    pub fn reply(&self, asked: &Message, answer: &[u8]) -> Result<()> {
        let reply_key = asked.payload.split(|byte| *byte == 0).next().unwrap();
        if !is_reply_key(reply_key) || reply_key == asked.payload {
            return Err(invalid("the message is no request"));
        }
        self.publish(reply_key, answer)
    }
}

/// Whether a key is one for answers, which any server accepts.  A segment ! in
/// another place would have it disconnect this client [REQUEST-3].
fn is_reply_key(key: &[u8]) -> bool {
    let parts: Vec<&[u8]> = key.split(|byte| *byte == b'/').collect();
    let is_right = |part: &[&[u8]]| match part {
        [b"!", b"cred", gid, uid, pid] => {
            [*gid, *uid, *pid].concat().iter().all(u8::is_ascii_digit)
        }
        rest => rest.len() == 2 && !rest.contains(&&b"!"[..]),
    };
    let is_short = key.len() < 4000 && (7..64).contains(&parts.len());
    is_short && parts.len() % 5 == 2 && parts.chunks(5).all(is_right)
}

/// Return the message that is in a packet [CLIENT-2].
fn parse(packet: &[u8]) -> Message {
    let mut halves = packet.splitn(2, |byte| *byte == 0);
    let head = halves.next().unwrap_or_default();
    let payload = halves.next().unwrap_or_default().to_vec();
    let is_control = head.starts_with(b"CMSG ");
    let key = head[if is_control { 5 } else { 4 }..].to_vec();
    Message { is_control, key, payload }
}

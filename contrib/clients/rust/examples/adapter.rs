//! The adapter of the client in Rust for the conformance kit; spec/README.md
//! has its form: cargo build --example adapter
use sbus::{Bus, Message};
use std::io::{self, BufRead, ErrorKind};
use std::time::Duration;

fn decode(word: Option<&str>) -> Vec<u8> {
    let pairs = word.unwrap_or("-").as_bytes().chunks_exact(2);
    let pair_of = |pair| std::str::from_utf8(pair).unwrap();
    pairs.map(|pair| u8::from_str_radix(pair_of(pair), 16).unwrap()).collect()
}

fn encode(text: &[u8]) -> String {
    text.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Do what a line says, and return the answer.
fn perform(
    bus: &mut Bus,
    asked: &mut Message,
    line: &str,
) -> io::Result<String> {
    let mut words = line.split(' ');
    let word = words.next().unwrap_or_default();
    let (key, text) = (decode(words.next()), decode(words.next()));
    match word {
        "receive" => {
            *asked = bus.receive(None)?.ok_or(ErrorKind::BrokenPipe)?;
            let kind = if asked.is_control { "control" } else { "message" };
            let (key, payload) = (encode(&asked.key), encode(&asked.payload));
            return Ok(format!("{kind} {key} {payload}"));
        }
        "whoami" => {
            return Ok(format!("credentials {}", encode(&bus.whoami(None)?)))
        }
        "request" => {
            let answer = bus.request(&key, &text, Duration::from_secs(5))?;
            return Ok(format!("answer {}", encode(&answer)));
        }
        "reply" => bus.reply(asked, &key),
        "publish" => bus.publish(&key, &text),
        "subscribe" => bus.subscribe(&key),
        "unsubscribe" => bus.unsubscribe(&key),
        _ => {
            println!("ok");
            std::process::exit(0) // which closes the connection
        }
    }
    .map(|()| "ok".into())
}

fn main() -> io::Result<()> {
    let address = std::env::args_os().nth(1).filter(|text| !text.is_empty());
    let mut bus = Bus::connect(address)?;
    let mut asked =
        Message { is_control: false, key: vec![], payload: vec![] };
    for line in io::stdin().lock().lines() {
        match perform(&mut bus, &mut asked, &line?) {
            Ok(answer) => println!("{answer}"),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                println!("closed")
            }
            Err(error) => println!("error {error}"),
        }
    }
    Ok(())
}

//! The adapter of the client in Rust for the conformance kit; spec/README.md
//! has its form: cargo build --example adapter
use sbus::{Bus, Message};
use std::io::{self, ErrorKind::BrokenPipe};
use std::{env, time::Duration};

fn decode(word: &str) -> Vec<u8> {
    let byte = |end| u8::from_str_radix(&word[end - 2..end], 16).unwrap();
    (2..=word.len()).step_by(2).map(byte).collect() // of "-" none
}

fn encode(text: &[u8]) -> String {
    text.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn main() -> io::Result<()> {
    let mut bus = Bus::connect(env::args_os().nth(1))?;
    let mut last = Message::default();
    for line in io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let (key, text) = (decode(words[1]), decode(words[2]));
        let outcome = match words[0] {
            "subscribe" => bus.subscribe(&key).map(|()| vec![]),
            "unsubscribe" => bus.unsubscribe(&key).map(|()| vec![]),
            "publish" => bus.publish(&key, &text).map(|()| vec![]),
            "request" => bus.request(&key, &text, Duration::from_secs(5)),
            "reply" => bus.reply(&last, &text).map(|()| vec![]),
            "whoami" => bus.whoami(None),
            _ => bus.receive(None).and_then(|got| {
                last = got.ok_or(BrokenPipe)?;
                Ok(last.payload.clone())
            }),
        };
        let kind = if last.is_control { "control" } else { "ok" };
        match outcome.map(|text| encode(&text)) {
            Ok(text) => println!("{kind} {} {text}", encode(&last.key)),
            Err(error) if error.kind() == BrokenPipe => println!("closed"),
            Err(error) => println!("error {error}"),
        }
    }
    Ok(())
}

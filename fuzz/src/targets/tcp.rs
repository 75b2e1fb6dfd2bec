//! The soft fabric's TCP: greetings and frames.

use super::{take, Target};
use oxygin::fabric::soft::atomic::AtomicRequest;
use oxygin::fabric::soft::tcp::wire::{
    parse_counts, Bell, Frame, Hello, Refusal, WindowBytes, HEADER, HELLO, MAX_PAYLOAD, MAX_STRIPES,
};
use oxygin::rma::atomic::{Change, Width};

pub fn targets() -> Vec<Target> {
    vec![
        Target { name: "tcp-hello", seeds: hellos(), run: hello },
        Target { name: "tcp-frames", seeds: vec![frames()], run: stream },
    ]
}

fn hellos() -> Vec<Vec<u8>> {
    [false, true]
        .map(|answer| {
            Hello { answer, token: [4; 16], from: 1, to: 0, nranks: 3, stripe: 1, stripes: 4, silence: 5 }
                .emit()
                .to_vec()
        })
        .to_vec()
}

fn hello(mut input: &[u8]) {
    let bytes: [u8; HELLO] = take(&mut input);
    if let Ok(hello) = Hello::parse(&bytes) {
        assert!(hello.from < hello.nranks && hello.to < hello.nranks);
        assert!(hello.stripe < hello.stripes || hello.is_life());
        assert!(usize::from(hello.stripes) <= MAX_STRIPES);
        assert_eq!(hello.emit(), bytes);
    }
}

fn frames() -> Vec<u8> {
    let place = WindowBytes { rkey: 1, addr: 0x1000, len: 8 };
    let bell = Some(Bell { rkey: 2, addr: 0x2000, value: 1, counted: true });
    let mut stream = Vec::new();
    for frame in [
        Frame::Put { context: 0, place, bell: None },
        Frame::Put { context: 1, place, bell },
        Frame::Get { context: 2, place },
        Frame::Atomic { context: 2, place, counted: false },
        Frame::Atomic { context: 2, place, counted: true },
        Frame::Fetched { context: 2, seq: 7, value: 9 },
        Frame::Fence { context: 2, number: 1, counted: false },
        Frame::Fence { context: 2, number: 2, counted: true },
        Frame::Fenced { context: 2, number: 2 },
        Frame::Data { len: 8 },
        Frame::Refused { why: Refusal::Get, context: 3, place },
        Frame::End { context: 3, conns: 5 },
        Frame::Fin,
    ] {
        stream.extend(frame.emit());
        match frame {
            Frame::Put { bell: Some(_), .. } => stream.extend([0; 16 + 8]),
            Frame::Put { .. } | Frame::Data { .. } => stream.extend([0; 8]),
            Frame::Atomic { counted, .. } => {
                let request = AtomicRequest { change: Change::add(3), width: Width::Eight, fetches: true, seq: 7 };
                stream.extend(vec![0; if counted { 16 } else { 0 }]);
                stream.extend(request.encode());
            }
            Frame::Fence { counted: true, .. } => stream.extend([0; 16]),
            _ => {}
        }
    }
    stream
}

/// Walks a stream of frames as a receiver with four stripes does.
fn stream(mut input: &[u8]) {
    while let Some((header, rest)) = input.split_first_chunk::<HEADER>() {
        input = rest;
        let Ok(frame) = Frame::parse(header) else { return };
        assert_eq!(Frame::parse(&frame.emit()), Ok(frame));
        let payload = match frame {
            Frame::Put { place, bell, .. } => {
                if bell.is_some_and(|bell| bell.counted) {
                    let Some((counts, rest)) = input.split_at_checked(16) else { return };
                    std::hint::black_box(parse_counts(counts, 4));
                    input = rest;
                }
                place.len
            }
            Frame::Data { len } => len,
            Frame::Get { place, .. } | Frame::Refused { place, .. } => {
                assert!(place.len <= MAX_PAYLOAD);
                0
            }
            Frame::Atomic { place, counted, .. } => {
                assert!(place.len <= MAX_PAYLOAD);
                let Some((counts, rest)) = input.split_at_checked(if counted { 16 } else { 0 }) else { return };
                std::hint::black_box(parse_counts(counts, counts.len() / 4));
                let Some((body, rest)) = rest.split_at_checked(AtomicRequest::LEN) else { return };
                let Some(request) = AtomicRequest::parse(body) else { return };
                assert_eq!(request.encode(), body);
                input = rest;
                0
            }
            Frame::Fence { counted: true, .. } => {
                let Some((counts, rest)) = input.split_at_checked(16) else { return };
                std::hint::black_box(parse_counts(counts, 4));
                input = rest;
                0
            }
            Frame::Fence { .. } | Frame::Fenced { .. } | Frame::Fetched { .. } => 0,
            Frame::End { .. } | Frame::Fin => return,
        };
        assert!(payload <= MAX_PAYLOAD);
        let Some(rest) = input.get(payload as usize..) else { return };
        input = rest;
    }
}

//! The soft fabric: its connect message, the contact datagrams, and the rings in shared memory.

use super::{take, Target};
use oxygin::fabric::soft::atomic::AtomicRequest;
use oxygin::fabric::soft::hello::SoftHello;
use oxygin::fabric::soft::peer::contact;
use oxygin::fabric::soft::shm::message::{GetRequest, Header, MessageKind};
use oxygin::fabric::soft::shm::ring::{Consumer, Producer, POSITIONS};
use oxygin::rma::atomic::{Change, Width};

pub fn targets() -> Vec<Target> {
    vec![
        Target { name: "soft-hello", seeds: hellos(), run: hello },
        Target { name: "contact", seeds: datagrams(), run: datagram },
        Target { name: "get-request", seeds: vec![get().encode().to_vec()], run: get_request },
        Target { name: "atomic-request", seeds: atomics(), run: atomic_request },
        Target { name: "ring", seeds: rings(), run: ring },
    ]
}

fn hellos() -> Vec<Vec<u8>> {
    let hello = SoftHello {
        token: [3; 16],
        contact: b"oxygin-1".to_vec(),
        probe: 77,
        probe_value: [5; 16],
        tcp: ["10.0.0.1:7", "[fe80::1%3]:9"].map(|a| a.parse().expect("an address")).to_vec(),
    };
    vec![hello.encode(), SoftHello { tcp: vec![], ..hello }.encode()]
}

fn hello(input: &[u8]) {
    if let Ok(hello) = SoftHello::parse(2, input) {
        assert_eq!(SoftHello::parse(2, &hello.encode()).expect("our own"), hello);
    }
}

const TOKEN: [u8; 16] = [1; 16];

fn datagrams() -> Vec<Vec<u8>> {
    let ask = [&TOKEN[..], &[1], &5u32.to_le_bytes()].concat();
    assert_eq!(contact::parse(&ask, &TOKEN), Some((1, 5)), "the seed follows the format");
    vec![ask]
}

fn datagram(input: &[u8]) {
    let _ = contact::parse(input, &TOKEN);
}

fn get() -> GetRequest {
    GetRequest { len: 100, context: 2, seq: 3 }
}

fn get_request(input: &[u8]) {
    if let Some(request) = GetRequest::parse(input) {
        assert_eq!(GetRequest::parse(&request.encode()), Some(request));
    }
}

fn atomics() -> Vec<Vec<u8>> {
    let swap = Change::CompareSwap { compare: 1, compare_mask: 3, swap: 2, swap_mask: 7 };
    let seed = |(change, width)| AtomicRequest { change, width, fetches: true, seq: 9 }.encode().to_vec();
    [(Change::add(5), Width::Eight), (swap, Width::Four)].map(seed).to_vec()
}

fn atomic_request(input: &[u8]) {
    if let Some(request) = AtomicRequest::parse(input) {
        assert_eq!(request.encode(), input);
        std::hint::black_box(request.change.of(request.width.mask(), request.width));
    }
}

const SIZE: usize = 1024;

/// Memory of one ring, aligned.
struct Ring(Vec<u128>);

impl Ring {
    fn new() -> Self {
        Self(vec![0; (POSITIONS + SIZE) / 16 + 8])
    }

    fn at(&mut self) -> *mut u8 {
        let start = self.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the vector has 128 bytes more than a ring.
        unsafe { start.add(start.align_offset(128)) }
    }
}

/// Rings as a producer fills them: the head in 2 bytes, then the data.
fn rings() -> Vec<Vec<u8>> {
    let mut memory = Ring::new();
    let at = memory.at();
    // SAFETY: the memory lives to the end of the function and has this one producer.
    let mut producer = unsafe { Producer::new(at, SIZE) };
    let payload = [9u8; 300];
    let kinds = [
        (MessageKind::Put, 300),
        (MessageKind::Signal, 8),
        (MessageKind::Get, GetRequest::LEN as u32),
        (MessageKind::Pull, 48),
    ];
    for (kind, len) in kinds.into_iter().chain([
        (MessageKind::GetData, 100),
        (MessageKind::Atomic, AtomicRequest::LEN as u32),
        (MessageKind::GetDone, 0),
        (MessageKind::Put, 5),
    ]) {
        let header = Header { kind, len, key: 1, aux: 2, addr: 3 };
        // SAFETY: the payload has 300 bytes.
        assert!(unsafe { producer.push(header, payload.as_ptr()) });
    }
    producer.publish();
    // SAFETY: the ring's data follows its positions.
    let data = unsafe { std::slice::from_raw_parts(at.add(POSITIONS), SIZE) };
    // SAFETY: nobody else looks at the ring.
    let head = unsafe { Consumer::new(at, SIZE) }.head();
    let mut whole = (head as u16).to_le_bytes().to_vec();
    whole.extend_from_slice(data);
    vec![whole]
}

/// A consumer of a ring in which a peer left anything: it ends, and every payload lies inside the ring.
fn ring(mut input: &[u8]) {
    let head = u64::from(u16::from_le_bytes(take(&mut input)));
    let mut memory = Ring::new();
    let at = memory.at();
    let len = input.len().min(SIZE);
    // SAFETY: the ring's data follows its positions and has SIZE bytes.
    let data = unsafe {
        let data = at.add(POSITIONS);
        data.copy_from_nonoverlapping(input.as_ptr(), len);
        data as usize
    };
    // SAFETY: the memory outlives the consumer.
    let mut consumer = unsafe { Consumer::new(at, SIZE) };
    let mut messages = 0;
    while let Ok(Some(message)) = consumer.peek(head) {
        let start = message.payload as usize;
        assert!(start >= data && start + message.header.len as usize <= data + SIZE);
        assert_eq!(start % 8, 0);
        // SAFETY: inside the ring, just checked.
        std::hint::black_box(unsafe { message.copy() });
        consumer.pop(&message);
        messages += 1;
        assert!(messages <= SIZE / 24, "more messages than fit");
    }
}

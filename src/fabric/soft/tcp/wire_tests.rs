//! What goes over a data connection comes back as it was, and what is no frame is none.

use super::*;
use proptest::prelude::*;

fn place() -> impl Strategy<Value = WindowBytes> {
    (any::<u32>(), any::<u64>(), 0..=MAX_PAYLOAD).prop_map(|(rkey, addr, len)| WindowBytes { rkey, addr, len })
}

fn bell() -> impl Strategy<Value = Bell> {
    (any::<u32>(), any::<u64>(), any::<u64>(), any::<bool>()).prop_map(|(rkey, addr, value, counted)| Bell {
        rkey,
        addr,
        value,
        counted,
    })
}

fn frame() -> impl Strategy<Value = Frame> {
    let why = [Refusal::Put, Refusal::Get, Refusal::Signal, Refusal::Contexts, Refusal::Late, Refusal::Atomic];
    let why = proptest::sample::select(why.to_vec());
    prop_oneof![
        (any::<u32>(), place(), proptest::option::of(bell())).prop_map(|(context, place, bell)| Frame::Put {
            context,
            place,
            bell
        }),
        (any::<u32>(), place()).prop_map(|(context, place)| Frame::Get { context, place }),
        (0..=MAX_PAYLOAD).prop_map(|len| Frame::Data { len }),
        (why, any::<u32>(), place()).prop_map(|(why, context, place)| Frame::Refused { why, context, place }),
        Just(Frame::Fin),
        (any::<u32>(), place(), any::<bool>()).prop_map(|(context, place, counted)| Frame::Atomic {
            context,
            place,
            counted
        }),
        (any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(context, seq, value)| Frame::Fetched {
            context,
            seq,
            value
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(context, conns)| Frame::End { context, conns }),
        (any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(context, number, counted)| Frame::Fence {
            context,
            number,
            counted
        }),
        (any::<u32>(), any::<u32>()).prop_map(|(context, number)| Frame::Fenced { context, number }),
    ]
}

proptest! {
    #[test]
    fn frames_come_back(f in frame()) {
        prop_assert_eq!(Frame::parse(&f.emit()), Ok(f));
    }

    #[test]
    fn any_bytes_parse_or_not(b in any::<[u8; HEADER]>(), kind in 0xa0u8..0xac) {
        let mut b = b;
        let _ = Frame::parse(&b);
        b[0] = kind;
        if let Ok(f) = Frame::parse(&b) {
            prop_assert_eq!(Frame::parse(&f.emit()), Ok(f));
        }
    }

    #[test]
    fn greetings_come_back(
        token in any::<[u8; 16]>(), from in 0u32..9, to in 0u32..9, stripe in 0u16..3, answer: bool, silence: u32,
    ) {
        let h = Hello { answer, token, from, to, nranks: 9, stripe, stripes: 3, silence };
        prop_assert_eq!(Hello::parse(&h.emit()), Ok(h));
    }

    #[test]
    fn any_bytes_greet_or_not(b in any::<[u8; HELLO]>()) {
        let mut b = b;
        prop_assert!(Hello::parse(&b).is_err());
        b[..8].copy_from_slice(b"oxyTCPc\x05");
        if let Ok(h) = Hello::parse(&b) {
            prop_assert!(h.from < h.nranks && h.to < h.nranks && (h.stripe < h.stripes || h.is_life()));
        }
    }
}

#[test]
fn an_oversized_payload_is_malformed() {
    let f = Frame::Data { len: MAX_PAYLOAD + 1 };
    assert_eq!(Frame::parse(&f.emit()), Err(Malformed("a frame that is too long")));
}

#[test]
fn greetings_name_possible_ranks_and_stripes() {
    let h = Hello { answer: false, token: [7; 16], from: 1, to: 2, nranks: 3, stripe: 0, stripes: 1, silence: 0 };
    assert!(Hello::parse(&Hello { from: 3, ..h }.emit()).is_err());
    assert!(Hello::parse(&Hello { to: 3, ..h }.emit()).is_err());
    assert!(Hello::parse(&Hello { stripe: 1, ..h }.emit()).is_err());
    assert!(Hello::parse(&Hello { stripe: 1, stripes: 0, ..h }.emit()).is_err());
    assert!(Hello::parse(&Hello { stripes: 19, ..h }.emit()).is_err());
}

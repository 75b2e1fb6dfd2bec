use super::*;
use crate::comm::handle::Token;
use proptest::collection::vec;
use proptest::prelude::*;

const SENDER: Sender<'_> = Sender { token: Token::from_bytes([7; 16]), step: 5, name: "connect", rank: 2, nranks: 3 };

proptest! {
    #[test]
    fn requests_round_trip(common in vec(any::<u8>(), 0..100), slice in vec(any::<u8>(), 0..20)) {
        let addressed = slice.repeat(3);
        let bytes = encode_request(&SENDER, Ok(&common), &addressed).unwrap();
        for cut in 0..bytes.len() {
            prop_assert!(RequestHead::parse(&bytes[..cut]).is_ok());
            prop_assert!(Request::parse(&bytes[..cut]).is_err());
        }
        let request = Request::parse(&bytes).unwrap();
        prop_assert_eq!((request.head.step, request.head.rank, request.head.nranks), (5, 2, 3));
        prop_assert!(request.head.token == SENDER.token);
        prop_assert_eq!((request.name, request.common.unwrap()), ("connect", &common[..]));
        let slices = (0..3).map(|rank| Request::parse(&bytes).unwrap().slice(rank).to_vec());
        prop_assert!(slices.into_iter().all(|s| s == slice));
    }

    #[test]
    fn replies_round_trip(entries in vec(vec(any::<u8>(), 0..9), 1..9), own in vec(any::<u8>(), 0..9)) {
        let n = entries.len() as u32;
        let shared = encode_list(entries.iter().map(Vec::as_slice));
        let mine = encode_list(std::iter::repeat_n(&own[..], n as usize));
        let mut bytes = gathered_head(9, shared.len(), mine.len());
        bytes.extend(shared.iter().chain(&mine));
        for cut in 0..bytes.len() {
            prop_assert!(ReplyHead::parse(&bytes[..cut]).is_ok());
            prop_assert!(Reply::parse(&bytes[..cut], n).is_err());
        }
        prop_assert!(Reply::parse(&bytes, n + 1).is_err() || own.is_empty() && entries.iter().all(Vec::is_empty));
        let Reply::Gathered { common, addressed } = Reply::parse(&bytes, n).unwrap() else { panic!() };
        for (range, entry) in common.into_iter().zip(&entries) {
            prop_assert_eq!(&bytes[range], &entry[..]);
        }
        for range in addressed {
            prop_assert_eq!(&bytes[range], &own[..]);
        }
    }

    #[test]
    fn changed_bytes_never_panic(changes in vec((0..90_usize, any::<u8>()), 1..6), extra in vec(any::<u8>(), 0..4)) {
        let mut request = encode_request(&SENDER, Ok(b"abc"), b"xxyyzz").unwrap();
        let list = encode_list([&b"a"[..], b"bc", b""].into_iter());
        let mut answer = gathered_head(5, list.len(), list.len());
        answer.extend(list.iter().chain(&list));
        for bytes in [&mut request, &mut answer] {
            for (at, value) in &changes {
                let at = at % bytes.len();
                bytes[at] = *value;
            }
            bytes.extend(&extra);
        }
        if let Ok(request) = Request::parse(&request) {
            (0..request.head.nranks.min(9)).for_each(|rank| { request.slice(rank); });
        }
        if let Ok(Reply::Gathered { common, addressed }) = Reply::parse(&answer, 3) {
            prop_assert!(common.iter().chain(&addressed).all(|range| answer.get(range.clone()).is_some()));
        }
    }

    #[test]
    fn anything_parses_or_fails(mut bytes in vec(any::<u8>(), 0..200), ours: bool) {
        if ours && bytes.len() > 7 {
            bytes[..7].copy_from_slice(b"oxyQ\x02\0\0");
        }
        let _ = Request::parse(&bytes);
        if ours && bytes.len() > 7 {
            bytes[..7].copy_from_slice(b"oxyA\x02\0\0");
        }
        let _ = Reply::parse(&bytes, 4);
    }
}

#[test]
fn failures_travel_in_one_line_and_within_limits() {
    let failure = Failure { code: 2, sentence: "é".repeat(MAX_SENTENCE) };
    let bytes = encode_failed(1, &failure);
    let Reply::Failed(read) = Reply::parse(&bytes, 2).unwrap() else { panic!() };
    assert!(read.code == 2 && read.sentence.len() == MAX_SENTENCE);
    let failure = Failure { code: 2, sentence: "a\x1b[0m\nb".into() };
    let bytes = encode_request(&SENDER, Err(&failure), b"not sent").unwrap_err();
    assert!(bytes.0.contains("slices"));
    let bytes = encode_request(&SENDER, Err(&failure), b"").unwrap();
    assert_eq!(Request::parse(&bytes).unwrap().common.unwrap_err().sentence, "a [0m b");
}

#[test]
fn sizes_are_checked_before_they_are_believed() {
    let mut bytes = encode_request(&SENDER, Ok(b""), b"").unwrap();
    // The length of a slice.
    bytes[40..44].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(RequestHead::parse(&bytes).is_err());
    let head = gathered_head(1, u32::MAX as usize, u32::MAX as usize);
    assert!(ReplyHead::parse(&head).is_err());
    assert!(RequestHead::parse(b"GET / HTTP/1.1").is_err());
    assert!(RequestHead::parse(b"ox").unwrap().is_none());
}

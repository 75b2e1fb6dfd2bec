//! How processes of one host come by each other's GPU windows: offers at registration, datagrams, and what is made of
//! them; and the messages by which a receiver is asked to copy from such a window.

use super::{take, Target};
use oxygin::fabric::soft::ipc::exchange::{answered, request, Answer, Answers, Collected, AT_ONCE};
use oxygin::fabric::soft::ipc::wire::{Datagram, Offer, Site, What, MAX_SEGMENTS};
use oxygin::fabric::soft::peer::contact::MAX_BODY;
use oxygin::fabric::soft::shm::message::PullRequest;

pub fn targets() -> Vec<Target> {
    vec![
        Target { name: "share-offer", seeds: offers(), run: offer },
        Target { name: "share-datagram", seeds: datagrams(), run: datagram },
        Target { name: "share-window", seeds: scripts(), run: window },
        Target { name: "pull-request", seeds: pulls(), run: pull },
    ]
}

/// Bytes of the window that the seeds are about.
const LEN: u64 = 1 << 20;

fn all_offers() -> [Offer; 3] {
    let site = Site::Gpu("0000:1b:00.0".into());
    let segments = Offer::Segments { offset: 4096, sizes: vec![1 << 20; 11], site };
    let host = Offer::Segments { offset: 0, sizes: vec![1 << 21], site: Site::Host };
    [segments, host, Offer::Not("no handle type".into())]
}

fn offers() -> Vec<Vec<u8>> {
    let of = |offer: &[u8]| [&LEN.to_le_bytes()[..], offer].concat();
    let mut seeds: Vec<_> = all_offers().map(|offer| of(&offer.encode())).to_vec();
    seeds.push(of(&[&[3][..], &garbled()].concat()));
    seeds
}

/// A reason as long as they get, in no encoding that there is.
fn garbled() -> Vec<u8> {
    [&160u32.to_le_bytes()[..], &[0xff; 160]].concat()
}

/// What is taken holds the whole window.
fn check(offer: &Offer, len: u64) {
    let holds = |offset: u64, bytes: u128| assert!(u128::from(offset) + u128::from(len) <= bytes);
    match offer {
        Offer::Segments { offset, sizes, .. } => {
            assert!((1..=MAX_SEGMENTS).contains(&sizes.len()));
            holds(*offset, sizes.iter().map(|&s| u128::from(s)).sum());
        }
        Offer::Not(why) => assert!(!why.contains(char::is_control)),
    }
}

fn offer(mut input: &[u8]) {
    let len = u64::from_le_bytes(take(&mut input));
    if let Some(offer) = Offer::parse(input, len) {
        check(&offer, len);
        assert_eq!(Offer::parse(&offer.encode(), len), Some(offer));
    }
}

/// A request, and every kind of answer to it.
fn all_datagrams() -> [Datagram; 3] {
    let segment = |segment, what| Datagram::Segment { round: 1, segment, what };
    [
        Datagram::Ask { window: 3, round: 1, first: 8, count: 3 },
        segment(0, What::Descriptor),
        segment(2, What::Refused("cuMemExportToShareableHandle failed".into())),
    ]
}

fn datagrams() -> Vec<Vec<u8>> {
    let mut seeds: Vec<_> = all_datagrams().map(|d| d.encode()).to_vec();
    seeds.push([&[4, 1, 0, 0, 0, 2, 0, 0, 0][..], &garbled()].concat());
    seeds
}

fn datagram(input: &[u8]) {
    if let Some(datagram) = Datagram::parse(input) {
        let body = datagram.encode();
        assert!(body.len() <= MAX_BODY);
        assert_eq!(Datagram::parse(&body), Some(datagram));
    }
}

/// Scripts for `window`: the length of the window, an offer behind its length, then datagrams, each behind its length
/// and whether a descriptor is attached.
fn scripts() -> Vec<Vec<u8>> {
    let script = |offer: &Offer, datagrams: &[Datagram]| {
        let offer = offer.encode();
        let mut script = [&LEN.to_le_bytes()[..], &(offer.len() as u16).to_le_bytes(), &offer].concat();
        for datagram in datagrams {
            let body = datagram.encode();
            let attached = matches!(datagram, Datagram::Segment { what: What::Descriptor, .. });
            script.extend([body.len() as u8, u8::from(attached)]);
            script.extend(body);
        }
        script
    };
    let [segments, ..] = all_offers();
    let [ask, one, refused] = all_datagrams();
    let each = (0..11).rev().map(|segment| Datagram::Segment { round: 1, segment, what: What::Descriptor });
    vec![
        script(&segments, &[&[ask, one.clone()][..], &each.collect::<Vec<_>>()].concat()),
        script(&segments, &[one, refused]),
    ]
}

/// A registration while its one peer says anything: it asks and sends within bounds, keeps no more than it asked for,
/// and takes a window for complete only with everything that was offered.
fn window(mut input: &[u8]) {
    let len = u64::from_le_bytes(take(&mut input));
    let bytes = usize::from(u16::from_le_bytes(take(&mut input)));
    let (message, mut input) = input.split_at(bytes.min(input.len()));
    let Some(offer) = Offer::parse(message, len) else { return };
    check(&offer, len);
    let Offer::Segments { offset, sizes, .. } = offer else { return };
    let segments = sizes.len() as u32;
    let mut answers = Answers::default();
    let round = answers.expect(1);
    let mut collected = Collected::new(offset, sizes.clone());
    let mut imported = 0;
    while let Some(missing) = collected.missing() {
        let (first, count) = request(missing);
        assert!(first < segments && (1..=AT_ONCE).contains(&count));
        let heard = answers.take();
        assert!(heard.len() <= 4 * AT_ONCE as usize);
        for Answer { rank, segment, what, file } in heard {
            assert_eq!(rank, 1, "an answer to another request");
            let import = |file: ()| {
                imported += 1;
                Ok(file)
            };
            if collected.take(segment, what, file, import).is_err() {
                return;
            }
        }
        assert!(imported <= segments, "each segment is imported once");
        if input.is_empty() {
            return;
        }
        // Several between two looks.
        for _ in 0..=first % 40 {
            let [n, attached] = take(&mut input);
            let (body, rest) = input.split_at(usize::from(n).min(input.len()));
            input = rest;
            match Datagram::parse(body) {
                Some(Datagram::Ask { first, count, .. }) => {
                    let sent = answered(first, count, segments);
                    assert!(sent.len() <= AT_ONCE as usize && sent.end <= segments);
                }
                Some(Datagram::Segment { round: of, segment, what }) => {
                    let file = (attached & 1 != 0).then_some(());
                    answers.hear(of, Answer { rank: u32::from(of == round), segment, what, file });
                }
                None => {}
            }
        }
    }
    match collected.complete() {
        Some((all, _)) => {
            assert_eq!(imported, segments);
            assert!(all.iter().map(|(_, size)| size).eq(&sizes));
        }
        None => panic!("nothing is missing, but it is not complete"),
    }
}

fn pulls() -> Vec<Vec<u8>> {
    [None, Some((5, 0x2000, 1))]
        .map(|signal| PullRequest { len: 100, from: 0x1000, window: 2, number: 7, signal }.encode().to_vec())
        .to_vec()
}

fn pull(mut input: &[u8]) {
    if let Some(request) = PullRequest::parse(&take(&mut input)) {
        assert_eq!(PullRequest::parse(&request.encode()), Some(request));
    }
}

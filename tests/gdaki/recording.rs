//! Recordings of device code (`OXYGIN_GDAKI_CAPTURE`), read by their text alone.

use oxygin::config::Ringing;
use std::iter::Peekable;
use std::str::{FromStr, Lines, SplitWhitespace};

/// What a set's device code wrote.
#[derive(Debug)]
pub struct Recording {
    pub rank: usize,
    pub nranks: usize,
    pub contexts: usize,
    pub sink: u32,
    /// Key, and words a context; the key is 0 where there are none.
    pub signals: (u32, u64),
    pub counters: (u32, u64),
    pub queues: Vec<RecordedQueue>,
}

/// A send queue.
#[derive(Debug)]
pub struct RecordedQueue {
    pub context: usize,
    pub peer: usize,
    pub is_companion: bool,
    pub number: u32,
    pub slots: u32,
    pub handler: Ringing,
    pub is_rung: bool,
    pub is_counted: bool,
    /// Entries that were taken, of which the first ones are here.
    pub taken: u64,
    pub windows: Vec<RecordedWindow>,
    pub entries: Vec<RecordedEntry>,
}

/// What a key named.
#[derive(Clone, Debug)]
pub struct RecordedWindow {
    pub key: u32,
    /// Bytes here and at the peer; `None`: it named nothing.
    pub lengths: Option<(u64, u64)>,
}

/// An entry.
#[derive(Debug)]
pub struct RecordedEntry {
    /// The first one of a look at the queue.
    pub is_first: bool,
    pub bytes: [u8; 64],
    pub meaning: String,
    pub end: String,
}

/// The words of a line.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    fn text(&mut self) -> &'a str {
        self.0.next().expect("one more word")
    }

    fn number<T: FromStr<Err: std::fmt::Debug>>(&mut self) -> T {
        self.text().parse().expect("a number")
    }

    fn key(&mut self) -> u32 {
        hex_word(self.text())
    }
}

fn hex_word(text: &str) -> u32 {
    u32::from_str_radix(text, 16).expect("hexadecimal digits")
}

/// The lines of a text, each of which has to begin with the word that is asked for.
struct Text<'a>(Peekable<Lines<'a>>);

impl<'a> Text<'a> {
    /// The rest of the next line, if it begins with this word.
    fn maybe(&mut self, word: &str) -> Option<Words<'a>> {
        let line = self.0.next_if(|line| line.split_whitespace().next() == Some(word))?;
        Some(Words(line[word.len()..].split_whitespace()))
    }

    fn line(&mut self, word: &str) -> Words<'a> {
        self.maybe(word).unwrap_or_else(|| panic!("no `{word}` in {:?}", self.0.peek()))
    }
}

impl Recording {
    /// Reads the text; panics where it is none, or was cut.
    pub fn read(text: &str) -> Self {
        let mut text = Text(text.lines().peekable());
        assert_eq!(text.0.next(), Some("oxygin gdaki capture 1"), "another version");
        for word in ["library", "nccl", "layout", "fabric", "memory"] {
            text.line(word);
        }
        let mut rank = text.line("rank");
        text.line("set");
        let mut contexts = text.line("contexts");
        let sink = text.line("sink").key();
        let (mut signals, mut counters) = (text.line("signals"), text.line("counters"));
        let mut recording = Self {
            rank: rank.number(),
            nranks: rank.number(),
            contexts: contexts.number(),
            sink,
            signals: (signals.key(), signals.number()),
            counters: (counters.key(), counters.number()),
            queues: Vec::new(),
        };
        while let Some(words) = text.maybe("queue") {
            recording.queues.push(RecordedQueue::read(words, &mut text));
        }
        text.maybe("left");
        text.line("end");
        assert_eq!(text.0.next(), None, "nothing is behind the end");
        recording
    }
}

impl RecordedQueue {
    fn read(mut words: Words, text: &mut Text) -> Self {
        let (context, peer) = (words.number(), words.number());
        let is_companion = match words.text() {
            "main" => false,
            "companion" => true,
            other => panic!("no kind of queue: {other}"),
        };
        let (number, slots) = (text.line("number").number(), text.line("slots").number());
        let mut rings = text.line("rings");
        let handler = match rings.text() {
            "doorbell" => Ringing::Doorbell,
            "proxy" => Ringing::Proxy,
            "free-flow" => Ringing::FreeFlow,
            other => panic!("no ringing: {other}"),
        };
        let is_rung = rings.text() == "rung";
        let is_counted = text.line("completions").text() == "counted";
        let mut counts = text.line("entries");
        let (kept, taken): (usize, u64) = (counts.number(), counts.number());
        let (mut windows, mut entries) = (Vec::new(), Vec::new());
        while let Some(mut words) = text.maybe("window") {
            let key = words.key();
            let lengths = match words.text() {
                "none" => None,
                here => Some((here.parse().expect("bytes"), words.number())),
            };
            windows.push(RecordedWindow { key, lengths });
        }
        while let Some(words) = text.maybe("entry") {
            entries.push(RecordedEntry::read(words, entries.len()));
        }
        assert_eq!(entries.len(), kept, "queue {number}");
        Self { context, peer, is_companion, number, slots, handler, is_rung, is_counted, taken, windows, entries }
    }
}

impl RecordedEntry {
    fn read(mut words: Words, index: usize) -> Self {
        assert_eq!(words.number::<usize>(), index, "entries are in their order");
        let is_first = words.text() == "+";
        let mut bytes = [0; 64];
        for segment in bytes.chunks_exact_mut(16) {
            let digits = words.text();
            assert_eq!(digits.len(), 32);
            for (i, byte) in segment.iter_mut().enumerate() {
                *byte = hex_word(&digits[2 * i..2 * i + 2]) as u8;
            }
        }
        let rest = words.0.collect::<Vec<_>>().join(" ");
        let parts: Vec<_> = rest.trim_start_matches("| ").split(" | ").collect();
        let [meaning, end] = parts[..] else { panic!("an entry of {} parts", parts.len()) };
        Self { is_first, bytes, meaning: meaning.into(), end: end.into() }
    }
}

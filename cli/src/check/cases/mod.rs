//! The cases, by what they are about.

mod contexts;
mod data;
mod death;
mod gets;
mod load;
mod order;
mod queue;
mod refusals;
mod reload;
mod signals;
mod steps;
mod teardown;

use super::world::{CaseEnv, Outcome};
use crate::plugin::{Via, Way};

/// What a case found on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Rounds or items checked.
    pub rounds: u64,
    /// How many were wrong.
    pub wrong: u64,
    /// The first that was wrong, in words.
    pub first: Option<String>,
    /// Something that was left out, and why.
    pub note: Option<String>,
}

impl Tally {
    /// Counts one more item; `fault` describes it if it is wrong.
    pub fn item(&mut self, wrong: u64, fault: impl FnOnce() -> String) {
        self.rounds += 1;
        self.wrong += wrong;
        if wrong > 0 && self.first.is_none() {
            self.first = Some(fault());
        }
    }
}

/// What a case needs to make sense.
#[derive(Clone, Copy, Debug, Default)]
pub struct Needs {
    /// `iget` and `iflush`.
    pub gets: bool,
    /// More than one context.
    pub contexts: bool,
    /// Signals that may be weak.
    pub weak: bool,
    /// Two ranks or more.
    pub peers: bool,
    /// Holds for tables without data operations too.
    pub set_up_only: bool,
    /// All ranks on this machine, started by this process.
    pub local: bool,
    /// Calls into the data path, with what they return: nothing that a queue has.
    pub calls: bool,
    /// The queue that device code writes into.
    pub queue: bool,
    /// Of these, one of descriptors.
    pub descriptors: bool,
    /// Of these, a queue pair.
    pub queue_pairs: bool,
    /// Contexts for some peers only.
    pub stride: bool,
}

/// One test of the suite.
pub struct Case {
    /// What `--filter` selects by.
    pub name: &'static str,
    /// One line for `--list`.
    pub about: &'static str,
    /// When it is skipped.
    pub needs: Needs,
    /// What each rank runs.
    pub run: fn(&CaseEnv<'_>) -> Outcome<Tally>,
}

impl Case {
    /// Whether it has anything to say of this way: cases of queues have not of a table's calls, and those of
    /// descriptors not of queue pairs.
    pub fn is_for(&self, way: Way) -> bool {
        let Needs { queue, descriptors, queue_pairs, .. } = self.needs;
        match way.via {
            Via::Calls => !queue,
            Via::Queue => !queue_pairs,
            Via::Gdaki(_) => !descriptors,
        }
    }

    /// Why the case cannot run on this table with so many ranks.
    pub fn skipped(&self, way: Way, nranks: usize, local: bool) -> Option<&'static str> {
        let (needs, kind) = (self.needs, way.kind);
        match () {
            () if !way.has_data_operations() && !needs.set_up_only => Some("the table has no data operations"),
            () if needs.gets && !way.has_gets() => Some("the table has no gets"),
            () if needs.contexts && !kind.has_contexts() => Some("the table has one context only"),
            () if needs.weak && !way.has_weak_signals() => Some("all signals of this table are strong"),
            () if needs.calls && way.is_gdaki() => {
                Some("about calls; queue- and gdaki- cases have what holds for entries")
            }
            () if needs.calls && way.is_by_device_code() => {
                Some("about calls; the queue- cases have what holds for descriptors")
            }
            () if needs.stride && !way.has_stride() => Some("the table has no rank stride"),
            () if needs.peers && nranks < 2 => Some("one rank has no peers"),
            () if needs.local && !local => Some("needs all ranks on this machine (--local)"),
            () => None,
        }
    }
}

const ANY: Needs = Needs {
    gets: false,
    contexts: false,
    weak: false,
    peers: false,
    set_up_only: false,
    local: false,
    calls: false,
    queue: false,
    descriptors: false,
    queue_pairs: false,
    stride: false,
};
const GETS: Needs = Needs { gets: true, ..ANY };
const PEERS: Needs = Needs { peers: true, ..ANY };
const CALLS: Needs = Needs { calls: true, ..ANY };

/// The suite, in the order it runs.
pub fn all() -> impl Iterator<Item = &'static Case> {
    ALL.iter().chain(queue::ALL)
}

/// What holds for all ways.
const ALL: &[Case] = &[
    Case {
        name: "set-up",
        about: "a communicator comes up, says sane things of itself, and goes down",
        needs: Needs { set_up_only: true, ..ANY },
        run: teardown::set_up,
    },
    Case {
        name: "put-sizes",
        about: "puts of many sizes at aligned and odd offsets, with the bytes around them",
        needs: ANY,
        run: data::put_sizes,
    },
    Case {
        name: "put-pages",
        about: "puts that start and end around page boundaries",
        needs: ANY,
        run: data::put_pages,
    },
    Case {
        name: "put-big",
        about: "one put of 64 MiB and some bytes; with --full over 1 GiB",
        needs: ANY,
        run: data::put_big,
    },
    Case {
        name: "put-random",
        about: "random puts among all ranks against a model",
        needs: ANY,
        run: data::put_random,
    },
    Case { name: "self", about: "puts, signals and gets to oneself", needs: ANY, run: data::to_self },
    Case {
        name: "signal-inc",
        about: "increments add one, whatever the value argument says",
        needs: ANY,
        run: signals::increments,
    },
    Case {
        name: "signal-add",
        about: "64-bit additions: carries, high bits, wrap-around",
        needs: ANY,
        run: signals::additions,
    },
    Case { name: "signal-words", about: "4096 neighbouring signal words keep apart", needs: ANY, run: signals::words },
    Case {
        name: "signal-fan-in",
        about: "all ranks add to one word at once; nothing is lost",
        needs: ANY,
        run: signals::fan_in,
    },
    Case {
        name: "order-strong",
        about: "a strong signal comes after every earlier put and signal, small and large",
        needs: ANY,
        run: order::strong,
    },
    Case {
        name: "order-put-signal",
        about: "a put's own signal comes after its data, any size",
        needs: ANY,
        run: order::put_signal,
    },
    Case {
        name: "order-weak",
        about: "a weak signal comes after its own put",
        needs: Needs { weak: true, ..CALLS },
        run: order::weak,
    },
    Case {
        name: "get-sizes",
        about: "gets of many sizes at aligned and odd offsets, flushed",
        needs: GETS,
        run: gets::sizes,
    },
    Case {
        name: "get-fresh",
        about: "a get brings what was there when the owner last signalled",
        needs: GETS,
        run: gets::fresh,
    },
    Case {
        name: "source-reuse",
        about: "test says true only when the source may be overwritten",
        needs: ANY,
        run: load::source_reuse,
    },
    Case {
        name: "outstanding",
        about: "65,536 unfinished operations on one context",
        needs: ANY,
        run: load::outstanding,
    },
    Case {
        name: "contexts-data",
        about: "several contexts in use at once, from several threads",
        needs: Needs { contexts: true, ..ANY },
        run: contexts::data,
    },
    Case {
        name: "contexts-independent",
        about: "large puts on one context do not hold up a signal of another",
        needs: Needs { contexts: true, peers: true, ..ANY },
        run: contexts::independent,
    },
    Case { name: "passive", about: "a rank that calls nothing still receives", needs: PEERS, run: load::passive },
    Case {
        name: "communicators",
        about: "two communicators at once; a handle of one is foreign to the other",
        needs: ANY,
        run: contexts::communicators,
    },
    Case { name: "bad-rank", about: "ranks out of range are refused", needs: CALLS, run: refusals::rank },
    Case {
        name: "bad-context",
        about: "contexts out of range are refused",
        needs: Needs { contexts: true, ..CALLS },
        run: refusals::context,
    },
    Case {
        name: "bad-handle",
        about: "NULL and foreign window handles are refused",
        needs: CALLS,
        run: refusals::handle,
    },
    Case {
        name: "bad-offset",
        about: "ranges past the window, and sums that overflow, are refused",
        needs: CALLS,
        run: refusals::offset,
    },
    Case { name: "bad-op", about: "unknown signal operations are refused", needs: CALLS, run: refusals::op },
    Case {
        name: "bad-signal",
        about: "signals past the end or not 8-byte aligned are refused",
        needs: CALLS,
        run: refusals::signal,
    },
    Case {
        name: "bad-memory",
        about: "deregistered windows are refused, and so is a second deregMrSym",
        needs: CALLS,
        run: refusals::memory,
    },
    Case {
        name: "bad-null",
        about: "NULL where a result or an object belongs is refused",
        needs: CALLS,
        run: refusals::null,
    },
    Case {
        name: "bad-step",
        about: "a collective call that one rank refuses ends on all ranks, and the next one works",
        needs: CALLS,
        run: steps::refused,
    },
    Case {
        name: "dead-peer",
        about: "SIGKILL of one rank: its peers are told, the others go on",
        needs: Needs { local: true, calls: true, ..PEERS },
        run: death::killed,
    },
    Case {
        name: "teardown",
        about: "any order, twice, half-initialised",
        needs: Needs { set_up_only: true, ..ANY },
        run: teardown::orders,
    },
    Case {
        name: "reload",
        about: "dlopen to dlclose 100 times leaves no thread, descriptor or mapping",
        needs: ANY,
        run: reload::hundred_times,
    },
];

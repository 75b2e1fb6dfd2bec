//! What a stopped peer costs those who talk to others: round trips of an 8-byte put with a signal between ranks 0 and
//! 1, alone, and while another thread of rank 0 has filled another context with operations to rank 2, a process that
//! is stopped.
//!
//! `cargo run --release --example beside_stopped [TURNS]`, with `OXYGIN_SOFT_TRANSPORT` as wanted. Ranks 0 and 1 are
//! threads of this process. The soft fabric, through the RMA v16 table.

use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::*;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as T;
use std::ffi::{c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

/// Bytes of an operation to the stopped rank.
const LARGE: usize = 16 << 10;
const RANKS: usize = 3;

type Handle = [u8; HANDLE_BYTES];

struct Rank {
    coll: *mut c_void,
    contexts: *mut c_void,
    instance: *mut c_void,
    data: *mut c_void,
    signals: *mut c_void,
    words: &'static [AtomicU64],
}

// SAFETY: the table's functions may be called from any thread.
unsafe impl Sync for Rank {}

fn good(what: &str, result: NcclResult) {
    assert_eq!(result, NcclResult::SUCCESS, "{what}");
}

impl Rank {
    fn join(rank: usize, exchange: impl FnOnce(Handle) -> Vec<Handle>) -> Self {
        let words: &'static [AtomicU64] =
            Box::leak((0..LARGE / 4).map(|_| AtomicU64::new(0)).collect::<Vec<_>>().into_boxed_slice());
        let (mut instance, mut listen, mut coll, mut contexts) = (null_mut(), null_mut(), null_mut(), null_mut());
        let (mut data, mut signals) = (null_mut(), null_mut());
        let mut handle = [0; HANDLE_BYTES];
        // SAFETY: called as NCCL does, with memory that is never freed.
        unsafe {
            good("init", T.init.unwrap()(&mut instance, 1, None));
            good("listen", T.listen.unwrap()(instance, 0, handle.as_mut_ptr().cast(), &mut listen));
            let mut all = exchange(handle);
            let mut pointers: Vec<*mut c_void> = all.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
            let (n, rank) = (RANKS as c_int, rank as c_int);
            good("connect", T.connect.unwrap()(null_mut(), pointers.as_mut_ptr(), n, rank, listen, &mut coll));
            good("closeListen", T.close_listen.unwrap()(listen));
            let mut config = ConfigV14 { n_contexts: 2, traffic_class: -1, rank_stride: 1 };
            good("createContext", T.create_context.unwrap()(coll, &mut config, &mut contexts));
            let base = words.as_ptr().cast_mut().cast::<c_void>();
            good("regMrSym", T.reg_mr_sym.unwrap()(coll, base, LARGE, PTR_HOST, 0, &mut data));
            let base = base.byte_add(LARGE);
            good("regMrSym", T.reg_mr_sym.unwrap()(coll, base, 64, PTR_HOST, 1, &mut signals));
        }
        Self { coll, contexts, instance, data, signals, words }
    }

    /// The rank's only signal.
    fn signal(&self) -> &AtomicU64 {
        &self.words[LARGE / 8]
    }

    fn put(&self, context: c_int, bytes: usize, peer: u32) -> *mut c_void {
        let (mut request, d, s) = (null_mut(), self.data, self.signals);
        // SAFETY: registered windows, which stay.
        let result = unsafe {
            T.iput_signal.unwrap()(
                self.contexts,
                context,
                0,
                d,
                bytes,
                0,
                d,
                peer,
                0,
                s,
                1,
                SIGNAL_OP_ADD,
                true,
                0,
                &mut request,
            )
        };
        good("iputSignal", result);
        request
    }

    fn finish(&self, request: *mut c_void) {
        let mut done = 0;
        while done == 0 {
            // SAFETY: a request of this rank's.
            good("test", unsafe { T.test.unwrap()(self.coll, request, &mut done) });
        }
    }

    fn wait(&self, value: u64) {
        while self.signal().load(Ordering::Acquire) < value {
            // SAFETY: plain call.
            good("progress", unsafe { T.rma_progress.unwrap()(self.contexts) });
        }
    }

    fn leave(self) {
        // SAFETY: plain calls in NCCL's order.
        unsafe {
            good("destroyContext", T.destroy_context.unwrap()(self.contexts));
            good("closeColl", T.close_coll.unwrap()(self.coll));
            good("finalize", T.finalize.unwrap()(self.instance));
        }
    }
}

fn read_handle(line: &str) -> Handle {
    let mut handle = [0; HANDLE_BYTES];
    let digits = line.trim().as_bytes().chunks_exact(2);
    for (byte, pair) in handle.iter_mut().zip(digits) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    }
    handle
}

fn written(handle: &Handle) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Rank 2: joins, takes part in nothing, and is stopped until its input ends.
fn stopped() {
    let mut input = std::io::stdin().lines();
    let mut next = || input.next().unwrap().unwrap();
    let rank = Rank::join(2, |mine| {
        println!("{}", written(&mine));
        (0..RANKS).map(|_| read_handle(&next())).collect()
    });
    // Everybody has found the way to it by then.
    rank.wait(1);
    println!("ready");
    rank.wait(next().parse().unwrap());
    println!("done");
    rank.leave();
}

/// Round trips between ranks 0 and 1 on context 1, in ns, sorted.
fn round_trips(rank: &Rank, first: &mut u64, turns: usize) -> Vec<u64> {
    let mut times: Vec<u64> = (0..turns)
        .map(|_| {
            let begun = Instant::now();
            let request = rank.put(1, 8, 1);
            *first += 1;
            rank.wait(*first);
            rank.finish(request);
            begun.elapsed().as_nanos() as u64
        })
        .collect();
    times.sort_unstable();
    times
}

fn say(what: &str, times: &[u64]) {
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize] as f64 / 1000.0;
    println!("{what:<24} {:>9.2} {:>9.2} {:>9.2} {:>9.1}", at(0.5), at(0.9), at(0.99), at(1.0));
}

fn signal(child: &Child, what: c_int) {
    // SAFETY: plain call; it is a child of this process that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, what) }, 0);
}

fn measure(rank: &Rank, child: &Child, turns: usize) -> u64 {
    rank.finish(rank.put(0, 8, 2));
    let mut first = 0;
    round_trips(rank, &mut first, turns / 10);
    println!("{:<24} {:>9} {:>9} {:>9} {:>9}", "round trip, µs", "median", "90 %", "99 %", "most");
    say("alone", &round_trips(rank, &mut first, turns));
    signal(child, libc::SIGSTOP);
    let (posted, over) = (AtomicU64::new(1), AtomicBool::new(false));
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut last = null_mut();
            while !over.load(Ordering::Acquire) {
                last = rank.put(0, LARGE, 2);
                posted.fetch_add(1, Ordering::AcqRel);
            }
            rank.finish(last);
        });
        // Until no more is taken.
        let (mut before, mut since) = (0, Instant::now());
        while since.elapsed() < Duration::from_millis(300) {
            let now = posted.load(Ordering::Acquire);
            if now != before {
                (before, since) = (now, Instant::now());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        say("beside a stopped peer", &round_trips(rank, &mut first, turns));
        let taken = posted.load(Ordering::Acquire);
        println!("{taken} operations were taken for it, and the next one waits");
        over.store(true, Ordering::Release);
        signal(child, libc::SIGCONT);
    });
    posted.into_inner()
}

fn main() {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("stopped") {
        return stopped();
    }
    let turns: usize = argument.map_or(50_000, |n| n.parse().unwrap());
    for (name, value) in [("OXYGIN_FABRIC", "soft"), ("OXYGIN_MAX_OPERATIONS", "1024"), ("OXYGIN_PEER_TIMEOUT", "600")]
    {
        if std::env::var_os(name).is_none() {
            std::env::set_var(name, value);
        }
    }
    if std::env::var_os("OXYGIN_SOFT_TRANSPORT").is_none() {
        // Copies by cross-memory attach need nothing of the peer: it would take everything although it is stopped.
        std::env::set_var("OXYGIN_SOFT_TRANSPORT", "no-cma");
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let mut child = again.arg("stopped").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let input = Mutex::new(child.stdin.take().unwrap());
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let third = read_handle(&output.next().unwrap().unwrap());
    let (handles, barrier) = (Mutex::new([[0; HANDLE_BYTES], [0; HANDLE_BYTES], third]), Barrier::new(3));
    let exchange = |rank: usize| {
        let (handles, barrier) = (&handles, &barrier);
        move |mine| {
            handles.lock().unwrap()[rank] = mine;
            barrier.wait();
            handles.lock().unwrap().to_vec()
        }
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let rank = Rank::join(1, exchange(1));
            let mut turn = 0;
            while !over.load(Ordering::Acquire) {
                if rank.signal().load(Ordering::Acquire) > turn {
                    turn += 1;
                    rank.finish(rank.put(1, 8, 0));
                }
                // SAFETY: plain call.
                good("progress", unsafe { T.rma_progress.unwrap()(rank.contexts) });
            }
            rank.leave();
        });
        let (child, output) = (&child, &mut output);
        let (input, over) = (&input, &over);
        let join = exchange(0);
        s.spawn(move || {
            let rank = Rank::join(0, join);
            let posted = measure(&rank, child, turns);
            writeln!(input.lock().unwrap(), "{posted}").unwrap();
            assert_eq!(output.nth(1).unwrap().unwrap(), "done");
            over.store(true, Ordering::Release);
            rank.leave();
        });
        barrier.wait();
        let all = *handles.lock().unwrap();
        all.iter().for_each(|handle| writeln!(input.lock().unwrap(), "{}", written(handle)).unwrap());
    });
    assert!(child.wait().unwrap().success());
}

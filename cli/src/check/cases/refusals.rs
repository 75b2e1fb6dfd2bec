//! Bad input: an error code, one log line with the call and the value, and the communicator goes on.

use super::Tally;
use crate::check::findings::is_echo;
use crate::check::pattern::{fill, wrong};
use crate::check::world::{add, bare, plain, spell, CaseEnv, Outcome, Request, Window, World};
use crate::plugin::log;
use crate::plugin::{Get, Put, Signal};
use nccl_plugin_api::NcclResult;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Duration;

const ROOM: usize = 64 << 10;
/// The good traffic's signal word, apart from whatever a wrongly accepted call may hit.
const TRAFFIC: usize = 3000;

pub(super) struct Bench<'a> {
    pub(super) world: World<'a>,
    pub(super) data: Window,
    flags: Window,
    pub(super) tally: Tally,
    rounds: u64,
}

/// Bad calls to make on every rank in turn, with good traffic of all ranks after each rank's turn.
fn with_bench(env: &CaseEnv<'_>, bad_calls: impl Fn(&mut Bench<'_>) -> Outcome<()>) -> Outcome<Tally> {
    let mut bench = Bench::open(env)?;
    if env.rank == 0 {
        bad_calls(&mut bench)?;
    }
    bench.close()
}

impl<'a> Bench<'a> {
    /// A communicator over which good traffic has passed.
    pub(super) fn open(env: &'a CaseEnv<'a>) -> Outcome<Self> {
        let world = World::open(env, 2)?;
        let (data, flags) = (world.window(ROOM, 0)?, world.window(4096, 1)?);
        let mut bench = Self { world, data, flags, tally: Tally::default(), rounds: 0 };
        bench.good_traffic()?;
        Ok(bench)
    }

    /// Good traffic once more, no error to be seen, and down.
    pub(super) fn close(mut self) -> Outcome<Tally> {
        let bad = self.world.has_error()?;
        self.tally.item(u64::from(bad), || "queryLastError reports an error after refused calls".into());
        self.goes_on()?;
        let Bench { world, data, flags, tally, .. } = self;
        world.close(&[&data, &flags])?;
        Ok(tally)
    }

    fn good_traffic(&mut self) -> Outcome<()> {
        let Self { world, data, flags, tally, rounds } = self;
        let env = world.env;
        env.barrier()?;
        let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
        for context in 0..world.contexts {
            *rounds += 1;
            let seed = |rank: usize| rank as u64 * 1000 + *rounds;
            fill(data.bytes(0, 1000), seed(env.rank));
            let request = world.put_signal(context, next, (data, 0), (data, 8192), 1000, &add(flags, TRAFFIC, 1))?;
            world.wait(request)?;
            world.wait_exactly(flags, TRAFFIC, *rounds, previous)?;
            let (bad, _) = wrong(data.bytes(8192, 1000), seed(previous));
            tally.item(bad, || format!("{bad} bytes of a good put are wrong"));
            env.barrier()?;
        }
        Ok(())
    }

    /// Good traffic after bad calls.
    pub(super) fn goes_on(&mut self) -> Outcome<()> {
        self.good_traffic().map_err(|e| {
            let before = self.tally.first.take();
            match (is_echo(&e), before) {
                (true, before) => before.unwrap_or(e),
                (false, None) => format!("after refused calls the communicator does not go on: {e}"),
                (false, Some(f)) => {
                    format!("after refused calls the communicator does not go on: {e}; before that: {f}")
                }
            }
        })
    }

    /// Judges one call that has to be refused. `values`: one of them has to be in the log line; empty: any line does.
    pub(super) fn expect(
        &mut self,
        what: &str,
        call: &str,
        values: &[String],
        run: impl FnOnce(&World<'_>) -> NcclResult,
    ) {
        let mark = log::mark();
        let code = run(&self.world);
        // A second line may come from a helper thread.
        std::thread::sleep(Duration::from_millis(5));
        let lines = log::warnings_since(mark);
        let named = |text: &str| {
            let text = text.to_lowercase();
            text.contains(&call.to_lowercase())
                && (values.is_empty() || values.iter().any(|v| text.contains(&v.to_lowercase())))
        };
        let fault = match (code, lines.as_slice()) {
            (NcclResult::SUCCESS, _) => Some("was accepted".to_owned()),
            (NcclResult::REMOTE_ERROR | NcclResult::IN_PROGRESS, _) => Some(format!("returned {}", spell(code))),
            (_, []) => Some(format!("returned {} without a log line", spell(code))),
            (_, [line]) if named(&line.text) => None,
            (_, [line]) => Some(format!("logged {:?}, which lacks the call or the value {values:?}", line.text)),
            (_, lines) => {
                Some(format!("logged {} lines: {:?}", lines.len(), lines.iter().map(|l| &l.text).collect::<Vec<_>>()))
            }
        };
        self.tally.item(u64::from(fault.is_some()), || format!("{call} with {what} {}", fault.unwrap_or_default()));
    }

    fn puts(&mut self, what: &str, values: &[String], put: Put) {
        self.expect(what, "iput", values, |w| w.raw_put(&put, None, &mut null_mut()));
        let signal = add(&self.flags, 8, 1);
        self.expect(what, "iputSignal", values, |w| w.raw_put(&put, Some(&signal), &mut null_mut()));
    }

    fn signal(&mut self, what: &str, values: &[String], signal: Signal) {
        let peer = self.peer();
        self.expect(what, "iputSignal", values, |w| w.raw_put(&bare(0, peer), Some(&signal), &mut null_mut()));
    }

    fn gets(&mut self, what: &str, values: &[String], get: Get) {
        if self.world.table.kind().has_gets() {
            self.expect(what, "iget", values, |w| {
                // SAFETY: whatever the case says; the plugin has to check it.
                unsafe { w.table.get(&w.target, &get, &mut null_mut()) }
            });
        }
    }

    fn flushes(&mut self, what: &str, values: &[String], context: i32, mh: *mut c_void, rank: u32) {
        if self.world.table.kind().has_gets() {
            self.expect(what, "iflush", values, |w| {
                // SAFETY: as above.
                unsafe { w.table.flush(&w.target, context, mh, rank, &mut null_mut()) }
            });
        }
    }

    fn peer(&self) -> usize {
        1 % self.world.env.nranks
    }

    fn good_put(&self) -> Put {
        plain(0, self.peer(), (&self.data, 16 << 10), (&self.data, 32 << 10), 64)
    }

    fn good_get(&self) -> Get {
        let mh = self.data.mh;
        let (remote_off, local_off, rank) = (32 << 10, 16 << 10, self.peer() as u32);
        Get { context: 0, remote_off, remote: mh, size: 64, local_off, local: mh, rank, opt_flags: 0 }
    }
}

fn say<T: ToString>(value: T) -> Vec<String> {
    vec![value.to_string()]
}

/// A number as decimal (of either sign) or hexadecimal.
fn number(value: u64) -> Vec<String> {
    vec![value.to_string(), (value as i64).to_string(), format!("{value:x}")]
}

/// Ranks past the end.
pub fn rank(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        for rank in [bench.world.env.nranks as u32, 1 << 20, i32::MAX as u32, u32::MAX] {
            let what = format!("rank {rank}");
            bench.puts(&what, &number(rank.into()), Put { rank, ..bench.good_put() });
            bench.gets(&what, &number(rank.into()), Get { rank, ..bench.good_get() });
            bench.flushes(&what, &number(rank.into()), 0, bench.data.mh, rank);
        }
        Ok(())
    })
}

/// Contexts past the end and negative ones.
pub fn context(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        for context in [bench.world.contexts as i32, 1 << 20, i32::MAX, -1, i32::MIN] {
            let what = format!("context {context}");
            bench.puts(&what, &say(context), Put { context, ..bench.good_put() });
            bench.gets(&what, &say(context), Get { context, ..bench.good_get() });
            bench.flushes(&what, &say(context), context, bench.data.mh, bench.peer() as u32);
        }
        Ok(())
    })
}

/// Window handles that are NULL, point at other memory, or at nothing.
pub fn handle(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        let foreign = vec![0_u8; 4096].leak().as_mut_ptr().cast::<c_void>();
        let wild = 0xdead_beef_0000_usize as *mut c_void;
        for (name, mh) in [("NULL", null_mut()), ("memory that is no handle", foreign), ("a wild handle", wild)] {
            let value = match mh.is_null() {
                true => vec!["null".into(), "0x0".into(), "(nil)".into()],
                false => vec![format!("{:x}", mh as usize), (mh as usize).to_string()],
            };
            bench.puts(&format!("{name} as source"), &value, Put { src: mh, ..bench.good_put() });
            bench.puts(&format!("{name} as target"), &value, Put { dst: mh, ..bench.good_put() });
            bench.signal(&format!("{name} as signal window"), &value, Signal { mh, ..add(&bench.flags, 8, 1) });
            bench.gets(&format!("{name} as remote window"), &value, Get { remote: mh, ..bench.good_get() });
            bench.gets(&format!("{name} as local window"), &value, Get { local: mh, ..bench.good_get() });
            bench.expect(name, "deregMrSym", &value, |w| {
                // SAFETY: the plugin has to check the handle.
                unsafe { w.table.dereg(w.target.coll_comm, mh) }
            });
        }
        Ok(())
    })
}

/// Ranges that leave the window, by one byte or by overflow.
pub fn offset(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        let room = ROOM as u64;
        for (off, size) in
            [(room - 63, 64), (room, 1), (room + 1, 8), (u64::MAX - 7, 64), (8, usize::MAX - 3), (1 << 63, 1 << 63)]
        {
            let what = |side: &str| format!("{side} offset {off} and size {size} in a window of {room} bytes");
            let value = [number(off), number(size as u64)].concat();
            bench.puts(&what("source"), &value, Put { src_off: off, size, ..bench.good_put() });
            bench.puts(&what("target"), &value, Put { dst_off: off, size, ..bench.good_put() });
            bench.gets(&what("remote"), &value, Get { remote_off: off, size, ..bench.good_get() });
            bench.gets(&what("local"), &value, Get { local_off: off, size, ..bench.good_get() });
        }
        Ok(())
    })
}

/// Signal operations that do not exist.
pub fn op(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        for op in [0, 3, 4, 17, u32::MAX] {
            bench.signal(&format!("signal op {op}"), &number(op.into()), Signal { op, ..add(&bench.flags, 8, 1) });
        }
        Ok(())
    })
}

/// Signal words outside the window or across a boundary.
pub fn signal(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        for off in [4096, 4089, 4095, 1 << 40, u64::MAX - 7, u64::MAX, 1, 4, 12, 2047] {
            let what = format!("signal offset {off} in a window of 4096 bytes");
            bench.signal(&what, &number(off), Signal { off, ..add(&bench.flags, 0, 1) });
        }
        Ok(())
    })
}

/// Memory that is registered no more, and registrations that end twice.
pub fn memory(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let world = World::open(env, 1)?;
    let (data, flags) = (world.window(ROOM, 0)?, world.window(4096, 1)?);
    let gone = world.window(ROOM, 0)?;
    let mut bench = Bench { world, data, flags, tally: Tally::default(), rounds: 0 };
    bench.good_traffic()?;
    bench.world.deregister(&gone)?;
    env.barrier()?;
    if env.rank == 0 {
        let mh = gone.mh;
        let value = [vec![format!("{:x}", mh as usize)], say(mh as usize)].concat();
        bench.puts("a deregistered source", &value, Put { src: mh, ..bench.good_put() });
        bench.puts("a deregistered target", &value, Put { dst: mh, ..bench.good_put() });
        bench.signal("a deregistered signal window", &value, Signal { mh, ..add(&bench.flags, 8, 1) });
        bench.gets("a deregistered remote window", &value, Get { remote: mh, ..bench.good_get() });
        bench.expect("a handle that was deregistered before", "deregMrSym", &value, |w| {
            // SAFETY: the plugin has to check the handle.
            unsafe { w.table.dereg(w.target.coll_comm, mh) }
        });
    }
    bench.goes_on()?;
    let Bench { world, data, flags, tally, .. } = bench;
    world.close(&[&data, &flags])?;
    Ok(tally)
}

/// NULL where a result goes, or an object.
pub fn null(env: &CaseEnv<'_>) -> Outcome<Tally> {
    with_bench(env, |bench| {
        let put = bench.good_put();
        let nothing: &[String] = &[];
        bench.expect("request NULL", "iput", nothing, |w| w.raw_put(&put, None, null_mut()));
        let signal = add(&bench.flags, 8, 1);
        bench.expect("request NULL", "iputSignal", nothing, |w| w.raw_put(&put, Some(&signal), null_mut()));
        bench.expect("request NULL", "test", nothing, |w| w.raw_test(Request::of(null_mut(), 0)).0);
        bench.expect("NULL for everything", "init", nothing, |w| {
            // SAFETY: the plugin has to check it. The logger stays, or there could be no line.
            unsafe { w.table.init(null_mut(), 0, log::logger()) }
        });
        bench.expect("NULL for the handle", "listen", nothing, |w| {
            // SAFETY: the plugin has to check it.
            unsafe { w.table.listen(w.instance, 0, null_mut(), &mut null_mut()) }
        });
        bench.expect("NULL for the count", "devices", nothing, |w| {
            // SAFETY: as above.
            unsafe { w.table.devices(null_mut()) }
        });
        bench.expect("NULL for the properties", "getProperties", nothing, |w| {
            // SAFETY: as above.
            unsafe { w.table.properties_raw(0, null_mut()) }
        });
        bench.expect("device 999", "getProperties", &say(999), |w| {
            // SAFETY: as above.
            unsafe { w.table.properties(999) }.map_or_else(|e| e.code, |_| NcclResult::SUCCESS)
        });
        Ok(())
    })
}

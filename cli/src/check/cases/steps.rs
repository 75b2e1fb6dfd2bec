//! Bad input to a collective call on one rank, good input on the others: an error there, an end of the call everywhere,
//! and the next good call works.
//!
//! Whether the call fails on the other ranks too is the plugin's choice: it may exchange nothing in it.

use super::refusals::Bench;
use super::Tally;
use crate::check::world::{named, CaseEnv, Outcome, Window, World};
use crate::plugin::{log, ContextConfig, Plugin, Table};
use nccl_plugin_api::{NcclResult, HANDLE_BYTES, PTR_HOST};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

const ROOM: usize = 64 << 10;

/// All three collective calls, refused by the first rank and by the last.
pub fn refused(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut bench = Bench::open(env)?;
    let mut wrong = vec![0, env.nranks - 1];
    wrong.dedup();
    for wrong in wrong {
        registrations(&mut bench, wrong)?;
        contexts(&mut bench, wrong)?;
    }
    let tally = bench.close()?;
    connects(env, tally)
}

/// What is wrong with a registration: data, size, type, and whether there is a place for the handle.
type Registration = (&'static str, &'static str, bool, usize, c_int, bool);

fn registrations(bench: &mut Bench<'_>, wrong: usize) -> Outcome<()> {
    const BAD: &[Registration] = &[
        ("data NULL", "null", true, ROOM, PTR_HOST, false),
        ("size 0", "0", false, 0, PTR_HOST, false),
        ("type 77", "77", false, ROOM, 77, false),
        ("mhandle NULL", "null", false, ROOM, PTR_HOST, true),
    ];
    for &(what, value, no_data, size, kind, no_place) in BAD {
        let env = bench.world.env;
        let window = Window::unregistered(ROOM)?;
        let data: *mut c_void = window.bytes(0, ROOM).as_mut_ptr().cast();
        let what = format!("{what} on rank {wrong}");
        env.barrier()?;
        if env.rank == wrong {
            bench.expect(&what, "regMrSym", &[value.into(), "0x0".into(), "nil".into()], |w| {
                let (mut mh, mut gin) = (null_mut(), null_mut());
                let place: *mut *mut c_void = if no_place { null_mut() } else { &mut mh };
                let data = if no_data { null_mut() } else { data };
                w.env.enter("regMrSym");
                // SAFETY: the plugin has to check it.
                let code = unsafe { w.table.reg(w.target.coll_comm, data, size, kind, 0, place, &mut gin) };
                w.env.beat();
                code
            });
        } else if let Ok(mh) = bench.world.register(data, ROOM, 0) {
            // Nobody uses it.
            bench.world.deregister_handle(mh.0)?;
        }
        env.barrier()?;
        window.free();
        let next = bench.world.window(ROOM, 0).map_err(|e| after("regMrSym", &what, &e))?;
        let first = std::mem::replace(&mut bench.data, next);
        bench.goes_on().map_err(|e| after("regMrSym", &what, &e))?;
        let next = std::mem::replace(&mut bench.data, first);
        env.barrier()?;
        bench.world.deregister(&next)?;
        next.free();
    }
    Ok(())
}

fn contexts(bench: &mut Bench<'_>, wrong: usize) -> Outcome<()> {
    // Older tables make their contexts in connect.
    if bench.world.table.kind().operations_name_comm() {
        return Ok(());
    }
    for (what, value, contexts, no_place) in
        [("0 contexts", "0", 0, false), ("-5 contexts", "-5", -5, false), ("NULL for the context", "null", 2, true)]
    {
        let env = bench.world.env;
        let what = format!("{what} on rank {wrong}");
        let good = ContextConfig { n_contexts: 2, ..ContextConfig::default() };
        env.barrier()?;
        if env.rank == wrong {
            bench.expect(&what, "createContext", &[value.into(), "0x0".into(), "nil".into()], |w| {
                let mut ctx = null_mut();
                let config = ContextConfig { n_contexts: contexts, ..good };
                create(w, &config, if no_place { null_mut() } else { &mut ctx })
            });
        } else {
            let mut ctx = null_mut();
            if create(&bench.world, &good, &mut ctx) == NcclResult::SUCCESS {
                destroy(&bench.world, ctx)?;
            }
        }
        env.barrier()?;
        let mut ctx = null_mut();
        match create(&bench.world, &good, &mut ctx) {
            NcclResult::SUCCESS => destroy(&bench.world, ctx)?,
            code => return Err(after("createContext", &what, &format!("it returned {}", code.0))),
        }
        bench.goes_on().map_err(|e| after("createContext", &what, &e))?;
    }
    Ok(())
}

fn create(world: &World<'_>, config: &ContextConfig, place: *mut *mut c_void) -> NcclResult {
    world.env.enter("createContext");
    // SAFETY: NULL or room for a pointer; the plugin has to check it.
    let code = unsafe { world.table.create_context(world.target.coll_comm, Some(config), place, null_mut()) };
    world.env.beat();
    code
}

fn destroy(world: &World<'_>, ctx: *mut c_void) -> Outcome<()> {
    world.env.enter("destroyContext");
    // SAFETY: what createContext returned just now.
    let code = unsafe { world.table.destroy_context(ctx) };
    world.env.beat();
    match code {
        NcclResult::SUCCESS => Ok(()),
        code => Err(format!("destroyContext returned {} for a context that nobody used", code.0)),
    }
}

fn connects(env: &CaseEnv<'_>, mut tally: Tally) -> Outcome<Tally> {
    env.enter("dlopen");
    let plugin = Plugin::open(&env.plugin).map_err(|e| e.to_string())?;
    let table = plugin.table(env.way.kind).map_err(|e| e.to_string())?.clone();
    let mut wrong = vec![0, env.nranks - 1];
    wrong.dedup();
    for wrong in wrong {
        let code = connect(env, &table, env.rank == wrong)?;
        let fault = env.rank == wrong && code == NcclResult::SUCCESS;
        tally.item(u64::from(fault), || format!("connect with collComm NULL on rank {wrong} was accepted"));
        let what = format!("collComm NULL on rank {wrong}");
        World::with_table(env, table.clone(), 1)
            .and_then(|world| world.close(&[]))
            .map_err(|e| after("connect", &what, &e))?;
    }
    Ok(tally)
}

/// `connect`, on the wrong rank without a place for the communicator, and down again.
fn connect(env: &CaseEnv<'_>, table: &Table, wrong: bool) -> Outcome<NcclResult> {
    let (mut instance, mut listener, mut comm) = (null_mut(), null_mut(), null_mut());
    let mut handle = [0_u8; HANDLE_BYTES];
    // SAFETY: places for results, but for one that the plugin has to check; objects in NCCL's order.
    unsafe {
        named("init", table.init(&mut instance, 11, log::logger()))?;
        named("listen", table.listen(instance, 0, handle.as_mut_ptr().cast(), &mut listener))?;
        let mut handles = env.gather(&handle)?;
        let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
        let (nranks, rank, config) = (env.nranks as i32, env.rank as i32, ContextConfig::default());
        let place: *mut *mut c_void = if wrong { null_mut() } else { &mut comm };
        env.enter("connect");
        let code = table.connect(instance, pointers.as_mut_ptr(), nranks, rank, &config, listener, place);
        env.beat();
        env.barrier()?;
        if !wrong && code == NcclResult::SUCCESS {
            named("closeColl", table.close_coll(comm))?;
        }
        named("closeListen", table.close_listen(listener))?;
        named("finalize", table.finalize(instance))?;
        env.beat();
        Ok(code)
    }
}

fn after(call: &str, what: &str, why: &str) -> String {
    format!("after {call} with {what} the next good call fails: {why}")
}

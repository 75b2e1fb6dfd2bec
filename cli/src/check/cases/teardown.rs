//! Coming up and going down, in every order.

use super::Tally;
use crate::check::world::{add, named, CaseEnv, Outcome, Window, World};
use crate::plugin::{log, ContextConfig, Plugin, Table};
use nccl_plugin_api::HANDLE_BYTES;
use std::ffi::c_void;
use std::ptr::null_mut;

/// Up, properties, one round of traffic, down; three times.
pub fn set_up(env: &CaseEnv<'_>) -> Outcome<Tally> {
    let mut tally = Tally::default();
    for contexts in [1, 4, 2] {
        let world = World::open(env, contexts)?;
        let missing: Vec<_> = world.table.missing().into_iter().filter(|&f| f != "progress").collect();
        let missing: Vec<_> = missing.into_iter().filter(|&f| f != "regMrSymDmaBuf").collect();
        tally.item(missing.len() as u64, || format!("the table has NULL for {}", missing.join(", ")));
        world.properties_are_sane()?;
        works(world)?;
    }
    Ok(tally)
}

/// One signal around the ring, then down in NCCL's order.
fn works(world: World<'_>) -> Outcome<()> {
    let env = world.env;
    let window = world.window(4096, 1)?;
    let (next, previous) = ((env.rank + 1) % env.nranks, (env.rank + env.nranks - 1) % env.nranks);
    if world.env.way.has_data_operations() {
        let last = world.contexts - 1;
        let request = world.signal(last, next, &add(&window, 0, 1))?;
        world.wait(request)?;
        world.wait_exactly(&window, 0, 1, previous)?;
    }
    world.close(&[&window])
}

/// Steps of taking down.
#[derive(Clone, Copy)]
enum Step {
    Deregister,
    DestroyContext,
    CloseColl,
    Finalize,
}

/// Every order below, then each step a second time; between the orders a whole communicator comes up and works.
pub fn orders(env: &CaseEnv<'_>) -> Outcome<Tally> {
    use Step::{CloseColl, Deregister, DestroyContext, Finalize};
    const ORDERS: &[&[Step]] = &[
        &[Deregister, DestroyContext, CloseColl, Finalize],
        &[DestroyContext, Deregister, CloseColl, Finalize],
        &[CloseColl, Deregister, DestroyContext, Finalize],
        &[CloseColl, DestroyContext, Finalize, Deregister],
        &[Finalize, CloseColl, DestroyContext, Deregister],
        &[Finalize, DestroyContext, Deregister, CloseColl],
        // Less than everything.
        &[CloseColl, Finalize],
        &[Finalize],
        &[Deregister, Finalize],
    ];
    env.enter("dlopen");
    let plugin = Plugin::open(&env.plugin).map_err(|e| e.to_string())?;
    let table = plugin.table(env.way.kind).map_err(|e| e.to_string())?.clone();
    let mut tally = Tally::default();
    for (i, order) in ORDERS.iter().enumerate() {
        let world = World::with_table(env, table.clone(), 2)?;
        let window = world.window(1 << 20, 1)?;
        if i % 2 == 1 {
            leave_unfinished(&world, &window)?;
        }
        // Nobody's window goes while somebody still sends there in earnest.
        env.barrier()?;
        for &step in order.iter().chain(*order) {
            take(&world, step, &window);
            env.beat();
        }
        env.barrier()?;
        works(World::with_table(env, table.clone(), 1)?)
            .map_err(|e| format!("after teardown order {i} a new communicator fails: {e}"))?;
        tally.item(0, String::new);
        env.progress_of(i as u64, ORDERS.len() as u64);
    }
    half_initialised(env, &table, &mut tally)?;
    works(World::with_table(env, table.clone(), 1)?)
        .map_err(|e| format!("after half-initialised teardown a new communicator fails: {e}"))?;
    Ok(tally)
}

fn leave_unfinished(world: &World<'_>, window: &Window) -> Outcome<()> {
    if !world.env.way.has_data_operations() {
        return Ok(());
    }
    let next = (world.env.rank + 1) % world.env.nranks;
    for _ in 0..32 {
        world.put(0, next, (window, 0), (window, 512 << 10), 256 << 10)?;
    }
    Ok(())
}

/// One step, whose result may be anything: the second time it is an error, and after finalize perhaps too.
fn take(world: &World<'_>, step: Step, window: &Window) {
    let (table, target) = (&world.table, &world.target);
    // SAFETY: objects of this communicator, some ended already: the plugin has to notice.
    unsafe {
        match step {
            Step::Deregister => {
                world.env.enter("deregMrSym");
                table.dereg(target.coll_comm, window.mh);
            }
            Step::DestroyContext => {
                world.env.enter("destroyContext");
                table.destroy_context(target.ctx);
            }
            Step::CloseColl => {
                world.env.enter("closeColl");
                table.close_coll(target.coll_comm);
            }
            Step::Finalize => {
                world.env.enter("finalize");
                table.finalize(world.instance);
            }
        }
    }
}

/// Stops at each stage of coming up, and hands NULL to everything that ends something.
fn half_initialised(env: &CaseEnv<'_>, table: &Table, tally: &mut Tally) -> Outcome<()> {
    for stage in 0..5 {
        let (mut instance, mut listener, mut comm) = (null_mut(), null_mut(), null_mut());
        let mut handle = [0_u8; HANDLE_BYTES];
        // SAFETY: places for results; objects in NCCL's order as far as the stage goes.
        unsafe {
            named("init", table.init(&mut instance, 9, log::logger()))?;
            if stage >= 1 {
                named("listen", table.listen(instance, 0, handle.as_mut_ptr().cast(), &mut listener))?;
            }
            if stage >= 3 {
                let mut handles = env.gather(&handle)?;
                let mut pointers: Vec<*mut c_void> = handles.iter_mut().map(|h| h.as_mut_ptr().cast()).collect();
                let (nranks, rank) = (env.nranks as i32, env.rank as i32);
                let config = ContextConfig::default();
                env.enter("connect");
                let code = table.connect(instance, pointers.as_mut_ptr(), nranks, rank, &config, listener, &mut comm);
                named("connect", code)?;
                env.beat();
                env.barrier()?;
            }
            // Stage 1 and 3 leave the listener to finalize, stage 4 closes it last.
            if stage == 2 {
                named("closeListen", table.close_listen(listener))?;
            }
            if stage == 4 {
                named("closeColl", table.close_coll(comm))?;
                named("closeListen", table.close_listen(listener))?;
            }
            named("finalize", table.finalize(instance))?;
        }
        env.beat();
        tally.item(0, String::new);
    }
    // SAFETY: the plugin has to check for NULL; what it answers is its own choice.
    unsafe {
        table.close_listen(null_mut());
        table.close_coll(null_mut());
        table.destroy_context(null_mut());
        table.dereg(null_mut(), null_mut());
        table.finalize(null_mut());
    }
    tally.item(0, String::new);
    env.barrier()
}

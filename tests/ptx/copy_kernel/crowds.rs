//! Commands of one kind, in crowds that find what all kinds together find late.

use super::*;

/// Commands by crowds of so many, 32 in all, each with a signal.
fn serve_crowds(ptx: &str, seed: u64, workers: u64, crowd: usize, command: fn(u64) -> Command) {
    let mut bench = Bench::new(ptx, seed, TARGETS + ROOM);
    bench.launch(workers, 1 << 40, 1 << 40);
    bench.run_until(Bench::is_up);
    let all: Vec<Command> =
        (0..32).map(|n| Command { signal: SIGNALS + 8 * n, increment: n + 1, ..command(n) }).collect();
    for some in all.chunks(crowd) {
        some.iter().for_each(|c| bench.bring(c));
        bench.post(some);
        while bench.done < bench.posted {
            bench.gpu.run(20);
            bench.check();
        }
    }
}

/// A piece at a time, for a warp of one of two blocks.
pub fn serve_pieces(ptx: &str, seed: u64) {
    let piece = |n| Command {
        from: SOURCES + 4096 * n,
        to: TARGETS + 4096 * n,
        bytes: 2048,
        flags: WORKERS,
        ..Command::default()
    };
    serve_crowds(ptx, seed, 2, 1, piece);
}

/// One that somebody waits for is said to be done before the kernel is through with all that is there.
pub fn serve_awaited(ptx: &str, seed: u64) {
    let mut bench = Bench::new(ptx, seed, TARGETS + ROOM);
    let command = |n: u64| {
        let flags = if n == 0 { REPORT } else { 0 };
        Command { flags, signal: SIGNALS + 8 * n, increment: 1, ..Command::default() }
    };
    let all: Vec<Command> = (0..8).map(command).collect();
    bench.post_within(&all, 1);
    bench.posted -= 8;
    bench.launch(0, 1 << 40, 1 << 40);
    bench.posted += 8;
    // It looks at one first, then at eight: the other seven are there, so it has no other reason to say so.
    while bench.gpu.memory.read(SIGNALS + 8 * 7, 8) == 0 {
        bench.gpu.run(1);
    }
    assert!(bench.word(64) > bench.first, "none is done");
}

/// One that nobody waits for is said to be done a poll later than another: of a kernel that waits for many polls
/// instead only the other one is heard of.
pub fn serve_unawaited(ptx: &str, seed: u64) {
    let says_so = |ptx: &str, flags| {
        let mut bench = Bench::new(ptx, seed, TARGETS + ROOM);
        bench.launch(0, 1 << 40, 1 << 40);
        bench.run_until(Bench::is_up);
        bench.post(&[Command { flags, signal: SIGNALS, increment: 1, ..Command::default() }]);
        bench.run_until(|b| b.gpu.memory.read(SIGNALS, 8) != 0);
        bench.gpu.run(20_000);
        bench.word(64) == bench.posted
    };
    assert!(says_so(ptx, 0) && says_so(ptx, UNAWAITED));
    let (two, many) = ("%p11, vain, 2;", "%p11, vain, 1000000;");
    assert!(ptx.contains(two));
    let late = ptx.replace(two, many);
    assert_eq!((says_so(&late, 0), says_so(&late, UNAWAITED)), (true, false));
}

/// Commands that are there before those ahead of them are carried out; each one's bytes come just before it.
pub fn serve_stream(ptx: &str, seed: u64) {
    let mut bench = Bench::new(ptx, seed, TARGETS + ROOM);
    bench.launch(0, 1 << 40, 1 << 40);
    bench.run_until(Bench::is_up);
    let mut n = 0;
    for _ in 0..24 {
        let mut post = |bench: &mut Bench, commands: u64| {
            for _ in 0..commands {
                let (from, to, signal) = (SOURCES + 16 * n, TARGETS + 16 * n, SIGNALS + 8 * n);
                n += 1;
                let c = Command { from, to, bytes: 16, signal, increment: n, ..Command::default() };
                bench.bring(&c);
                bench.post_within(&[c], 1);
            }
        };
        // One and eight more let it look at 32; whoever looks now sees the next eight, but not all that is behind them.
        post(&mut bench, 9);
        let some = bench.below(400);
        bench.gpu.run(some);
        post(&mut bench, 8);
        bench.gpu.stand();
        post(&mut bench, 8);
        bench.run_until(|b| b.word(64) == b.posted);
        bench.check();
    }
}

/// Signals alone that must not overtake.
pub fn serve_signals(ptx: &str, seed: u64) {
    serve_crowds(ptx, seed, 0, 8, |_| Command { flags: CUT, ..Command::default() });
}

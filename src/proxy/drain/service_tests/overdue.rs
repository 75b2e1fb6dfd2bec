//! A kernel that keeps lanes for longer than it lives.

use super::*;

#[test]
fn a_kernel_that_does_not_give_lanes_back_is_named_once() {
    let mut bench = Bench::new(3);
    bench.let_serve(3);
    let (now, limit) = (Instant::now(), Duration::from_secs(10));
    assert_eq!(bench.drain.watch_service(now, limit), None);
    let late = now + limit + Duration::from_secs(1);
    let said = bench.drain.watch_service(late, limit).expect("a sentence");
    assert!(said.contains("queue to rank 0, and 2 others") && said.contains("OXYGIN_STALL"), "{said}");
    assert_eq!(bench.drain.watch_service(late, limit), None);
    // The next one is another one.
    bench.told().stage = Stage::Over;
    bench.pass();
    assert_eq!(bench.drain.watch_service(late + limit, limit), None);
    bench.let_serve(3);
    assert!(bench.drain.watch_service(late + 2 * limit, limit).is_some());
}

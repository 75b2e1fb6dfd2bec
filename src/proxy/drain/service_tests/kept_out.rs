//! Somebody who keeps a kernel from the memory that its lanes go to.

use super::*;

/// Lanes that are at rest wait for whoever needs a rank's memory for himself, and not for long.
#[test]
fn who_keeps_a_kernel_out_is_waited_for() {
    for ends in [true, false] {
        let mut bench = Bench::new(2);
        bench.write(20);
        (0..2).for_each(|_| bench.pass());
        (bench.told().stage, bench.told().is_kept_out) = (Stage::Ready, true);
        bench.pass();
        bench.complete();
        bench.pass();
        let left = bench.standing();
        assert_eq!(bench.told().stage, Stage::Ready);
        if ends {
            bench.told().is_kept_out = false;
            bench.pass();
            assert_eq!((bench.standing(), bench.told().given), (left, 2), "nobody took anything meanwhile");
            continue;
        }
        std::thread::sleep(2 * REST_WITHIN);
        (0..2).for_each(|_| bench.pass());
        assert!(bench.standing() < left, "this thread goes on");
        assert_eq!(bench.told().given, 0);
    }
}

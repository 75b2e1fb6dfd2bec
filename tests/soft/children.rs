//! Signals of our tests reach their own children and nobody else.

use crate::support::children::{adopt, again, end, fork, is_ours, signal};
use std::io::{BufRead, BufReader};
use std::process::Stdio;

const LEAVES: &str = "OXYGIN_TEST_LEAVES";

#[test]
#[should_panic(expected = "is no child of this process")]
fn a_number_that_is_another_process_s_gets_no_signal() {
    // What a child's number is once somebody has waited for it: free for anybody. This process's own stands in for
    // that.
    signal(std::process::id() as libc::pid_t, libc::SIGSTOP);
}

#[test]
fn a_child_is_ours_until_it_is_waited_for() {
    let child = fork();
    signal(child, libc::SIGSTOP);
    signal(child, libc::SIGCONT);
    assert!(is_ours(child));
    end(child);
    assert!(!is_ours(child) && !is_ours(0) && !is_ours(-1) && !is_ours(1));
}

#[test]
fn what_a_child_leaves_behind_is_ours() {
    const NAME: &str = "what_a_child_leaves_behind_is_ours";
    if std::env::var_os(LEAVES).is_some() {
        println!("\nleft {}", fork());
        return;
    }
    adopt();
    let mut leaves = again(NAME).env(LEAVES, "").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(leaves.stdout.take().unwrap()).lines();
    let left = lines.find_map(|line| line.unwrap().strip_prefix("left ")?.parse().ok()).unwrap();
    assert!(leaves.wait().unwrap().success());
    end(left);
}

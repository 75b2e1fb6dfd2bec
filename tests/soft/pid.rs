//! A process number that comes back: a rank dies while its peer does nothing, and another program gets its number. In
//! a PID namespace of its own, where the next number can be chosen.

use crate::support::children::again;
use crate::support::common::*;
use crate::support::processes::*;
use nccl_plugin_api::NcclResult;
use oxygin::vtable::rma_v16::ncclRmaPlugin_v16 as TABLE;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const NAME: &str = "a_put_lands_in_no_other_process";
/// Set inside the namespace.
const INSIDE: &str = "OXYGIN_TEST_NAMESPACE";
/// Set for the process that has nothing to do with any of this.
const BYSTANDER: &str = "OXYGIN_TEST_BYSTANDER";
/// Where both the rank that dies and the bystander have memory.
const AT: usize = 0x3a00_0000_0000;
const BYTES: usize = 64 << 10;
const ITS_OWN: u8 = 0x5a;

fn map() -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping, which replaces none.
    let at = unsafe { libc::mmap(AT as *mut _, BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_eq!(at as usize, AT, "{}", std::io::Error::last_os_error());
    at.cast()
}

/// Has memory of its own, and ends with 0 if nobody has touched it by the time it is told to look.
fn stand_by() {
    let at = map();
    // SAFETY: just mapped.
    unsafe { at.write_bytes(ITS_OWN, BYTES) };
    println!("\nready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    // SAFETY: as above; volatile, since others may write it.
    let touched = (0..BYTES).filter(|&i| unsafe { at.add(i).read_volatile() } != ITS_OWN).count();
    std::process::exit((touched != 0) as i32);
}

/// Starts the bystander under this process number.
fn bystander(pid: u32) -> Child {
    let end = Instant::now() + Duration::from_secs(30);
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < end, "{pid} is not given back");
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..100 {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (pid - 1).to_string()).unwrap();
        let mut process = again(NAME).env(BYSTANDER, "1").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        if process.id() == pid {
            let ready = BufReader::new(process.stdout.take().unwrap()).lines().any(|l| l.unwrap() == "ready");
            assert!(ready);
            return process;
        }
        process.kill().unwrap();
        process.wait().unwrap();
    }
    panic!("no process gets number {pid}");
}

fn dies(place: &Place, r: &Rank) {
    let at = map();
    let mut handle = null_mut();
    // SAFETY: just mapped, and never unmapped.
    ok(unsafe { TABLE.reg_mr_sym.unwrap()(r.coll, at.cast(), BYTES, nccl_plugin_api::PTR_HOST, 0, &mut handle) });
    place.word(0).store(u64::from(std::process::id()), Ordering::SeqCst);
    while place.word(1).load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: plain call.
    unsafe { libc::raise(libc::SIGKILL) };
}

fn survives(place: &Place, r: &Rank) {
    let src = r.window(BYTES / 8, 0);
    r.wait(r.put(0, (&src, 0), BYTES, (&src, 0), 1, None));
    // Nothing is under way any more, and the helper thread has gone to sleep.
    std::thread::sleep(Duration::from_millis(300));
    let pid = place.word(0).load(Ordering::SeqCst) as u32;
    place.word(1).store(1, Ordering::SeqCst);
    let mut bystander = bystander(pid);
    let mut request = null_mut();
    let mut done = 0;
    let handle = src.handle;
    // SAFETY: as for `Rank::put`.
    let mut result = unsafe { TABLE.iput.unwrap()(r.ctx, 0, 0, handle, BYTES, 0, handle, 1, 0, &mut request) };
    let end = Instant::now() + Duration::from_secs(30);
    while result == NcclResult::SUCCESS && done == 0 && Instant::now() < end {
        // SAFETY: plain call.
        result = unsafe { TABLE.test.unwrap()(r.coll, request, &mut done) };
    }
    drop(bystander.stdin.take());
    assert!(bystander.wait().unwrap().success(), "a process that has nothing to do with it was written to");
    assert_eq!((result, done), (NcclResult::REMOTE_ERROR, 0));
}

#[test]
fn a_put_lands_in_no_other_process() {
    if std::env::var_os(BYSTANDER).is_some() {
        return stand_by();
    }
    if std::env::var_os(INSIDE).is_some() {
        return processes(NAME, 2, &[1], |place| {
            let r = place.join(1);
            match place.rank {
                0 => survives(place, &r),
                _ => dies(place, &r),
            }
        });
    }
    // SAFETY: plain call.
    let as_root: &[&str] = if unsafe { libc::geteuid() } == 0 { &[] } else { &["--user", "--map-root-user"] };
    let again = again(NAME);
    let mut inside = Command::new("unshare");
    inside.args(as_root).args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
    inside.arg(again.get_program()).args(again.get_args()).env(INSIDE, "1");
    let out = inside.output().expect("unshare, from util-linux");
    let said = String::from_utf8_lossy(&out.stderr);
    if said.contains("unshare failed") && std::env::var_os("OXYGIN_TEST_NO_NETNS").is_some() {
        return eprintln!("not run, as OXYGIN_TEST_NO_NETNS allows: {said}");
    }
    assert!(out.status.success(), "{}{said}", String::from_utf8_lossy(&out.stdout));
}

//! Queue pairs in GPU memory that the fake device reaches by copies alone, as it does on a real GPU
//! (`tests/fake-gpudirect`).

use crate::gpu::exercise;
use crate::harness::Fake;
use crate::support::children::again;
use crate::support::cuda::Cuda;
use std::os::unix::fs::symlink;

#[test]
fn what_kernels_ring_is_carried_by_copies() {
    let folder = std::env::temp_dir().join(format!("oxygin-gpudirect-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // What the library that stands before the driver needs.
    symlink(Cuda::path(), folder.join("libcuda.so.1")).unwrap();
    let mut process = again("in_a_process_whose_driver_is_found_by_its_name");
    let ended = process.env("LD_LIBRARY_PATH", &folder).status().unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(ended.success());
}

#[test]
#[ignore = "run by the test above"]
fn in_a_process_whose_driver_is_found_by_its_name() {
    let (fake, cuda) = (Fake::take(), Cuda::load());
    std::env::set_var("OXYGIN_LIBCUDA", Cuda::path().with_file_name("libfake_gpudirect.so"));
    exercise(&fake, &cuda);
}

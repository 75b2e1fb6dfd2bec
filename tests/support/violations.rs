//! What the fake CUDA driver says of uses that a real one would not stand.

use libloading::Library;

/// How many there were in this process.
pub fn count(fake: &Library) -> usize {
    // SAFETY: the fake has a function of this name and type.
    unsafe { fake.get::<extern "C" fn() -> usize>(b"fake_violations").unwrap()() }
}

/// Fails the test if there were more than so many, with the words of those.
pub fn check(fake: &Library, before: usize) {
    let all: Vec<_> = (before..count(fake)).map(|number| words(fake, number)).collect();
    assert!(all.is_empty(), "violations: {all:#?}");
}

fn words(fake: &Library, number: usize) -> String {
    type Words = unsafe extern "C" fn(usize, *mut u8, usize) -> usize;
    let mut words = vec![0; 1024];
    // SAFETY: the fake has a function of this name and type, which writes so many bytes at most.
    let n = unsafe { fake.get::<Words>(b"fake_violation").unwrap()(number, words.as_mut_ptr(), words.len()) };
    words.truncate(n);
    String::from_utf8_lossy(&words).into_owned()
}

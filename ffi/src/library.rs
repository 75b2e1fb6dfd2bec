//! A shared library opened at run time, and the sentence when it is not there.

use std::ffi::{c_void, CStr, CString};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Why a foreign library cannot be used: one sentence with the remedy, for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing(String);

impl Missing {
    /// A library that is missing for this reason.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }

    /// The sentence.
    pub fn sentence(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

/// An open shared library; closed when dropped. `libloading` knows no symbol versions, which libibverbs needs, hence
/// the calls to `dlopen` and `dlvsym` themselves.
#[derive(Debug)]
pub struct Library {
    handle: NonNull<c_void>,
    path: String,
}

// SAFETY: a dlopen handle is a reference count in the dynamic linker, which locks by itself.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `path` (a file name is looked up as the dynamic linker does) with local symbol scope. `remedy` ends the
    /// sentence when that fails.
    ///
    /// # Safety
    /// The library's initialisers run; it must be what its name says.
    pub unsafe fn open(path: &str, remedy: &str) -> Result<Self, Missing> {
        let name = CString::new(path).map_err(|_| Missing::new(format!("library path {path:?} holds a zero byte")))?;
        // SAFETY: `name` is a C string; the caller vouches for the library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, path: path.to_owned() }),
            None => Err(Missing::new(format!("{path} cannot be loaded: {}; {remedy}", last_error()))),
        }
    }

    /// The address of `name`, in the version asked for where the library has versions; `None` when it lacks it.
    #[inline(never)]
    pub fn symbol(&self, name: &CStr, version: Option<&CStr>) -> Option<NonNull<c_void>> {
        if let Some(version) = version {
            // SAFETY: the handle is open and both names are C strings.
            let at = unsafe { libc::dlvsym(self.handle.as_ptr(), name.as_ptr(), version.as_ptr()) };
            if let Some(at) = NonNull::new(at) {
                return Some(at);
            }
        }
        // A library that renamed its versions still has a default one.
        // SAFETY: the handle is open and the name is a C string.
        NonNull::new(unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) })
    }

    /// Keeps it in the process after this object went, for a library that leaves things behind when it is unloaded.
    pub fn keep(&self) {
        let Ok(name) = CString::new(self.path.as_str()) else { return };
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
        // SAFETY: `name` is a C string; the library is open already, so that nothing of it runs.
        let again = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if !again.is_null() {
            // SAFETY: gives back the reference that was just taken; the mark stays.
            unsafe { libc::dlclose(again) };
        }
    }

    /// What to say of a function that it lacks.
    #[cold]
    pub fn lacks(&self, name: &CStr, remedy: &str) -> Missing {
        Missing::new(format!("{} has no function {}; {remedy}", self.path, name.to_string_lossy()))
    }

    /// The path it was opened by.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: the handle came from dlopen and is closed once. Whoever took symbols holds this object.
        unsafe { libc::dlclose(self.handle.as_ptr()) };
    }
}

/// The functions `T` of a library in use, while somebody holds them. Weak: when the last owner goes the library is
/// unloaded, so that nothing of it stays behind after this one is unloaded, and the next call loads it afresh.
pub struct InUse<T>(Mutex<Option<(String, Weak<T>)>>);

impl<T> InUse<T> {
    /// None yet.
    pub const fn none() -> Self {
        Self(Mutex::new(None))
    }

    /// Those of the library that the environment variable names, or of `soname`. Otherwise as [`InUse::load_path`].
    ///
    /// # Safety
    /// As for [`InUse::load_path`].
    pub unsafe fn load(
        &self,
        variable: &str,
        soname: &str,
        remedy: &str,
        resolve: impl FnOnce(Library) -> Result<T, Missing>,
    ) -> Result<Arc<T>, Missing> {
        let named = std::env::var(variable).ok().filter(|path| !path.is_empty());
        // SAFETY: passed on.
        unsafe { self.load_path(named.as_deref().unwrap_or(soname), remedy, resolve) }
    }

    /// Those of the library at `path`, which is loaded, and its functions found by `resolve`, unless it is in use
    /// already.
    ///
    /// # Safety
    /// As for [`Library::open`].
    pub unsafe fn load_path(
        &self,
        path: &str,
        remedy: &str,
        resolve: impl FnOnce(Library) -> Result<T, Missing>,
    ) -> Result<Arc<T>, Missing> {
        let mut loaded = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, functions)) = &*loaded {
            if let (true, Some(functions)) = (at == path, functions.upgrade()) {
                return Ok(functions);
            }
        }
        // SAFETY: the caller's promise.
        let functions = Arc::new(resolve(unsafe { Library::open(path, remedy) }?)?);
        *loaded = Some((path.to_owned(), Arc::downgrade(&functions)));
        Ok(functions)
    }
}

fn last_error() -> String {
    // SAFETY: dlerror returns NULL or a C string that stays valid until this thread's next dl* call.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "no reason given".into()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_a_sentence() {
        // SAFETY: there is no such library, nothing runs.
        let e = unsafe { Library::open("libno-such-thing.so.9", "install it") }.unwrap_err();
        assert!(e.sentence().contains("libno-such-thing.so.9"), "{e}");
        assert!(e.sentence().ends_with("; install it"), "{e}");
    }

    #[test]
    fn symbols_are_found_with_and_without_versions() {
        // SAFETY: the C library, which is loaded already.
        let libc = unsafe { Library::open("libc.so.6", "") }.unwrap();
        assert!(libc.symbol(c"getpid", None).is_some());
        assert!(libc.symbol(c"getpid", Some(c"NO_SUCH_VERSION")).is_some());
        assert!(libc.symbol(c"no_such_function", None).is_none());
    }
}

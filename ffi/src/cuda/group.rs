//! Functions of the driver that come together: a driver has all of a group, or the group counts as missing.

/// A struct of functions and how it is resolved: `None` if the library lacks one.
macro_rules! group {
    ($(#[$doc:meta])* $group:ident { $($field:ident: $name:literal fn($($arg:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        pub(super) struct $group {
            $($field: unsafe extern "C" fn($($arg),*) -> CUresult,)*
        }

        impl $group {
            pub(super) fn resolve(library: &Library) -> Option<Self> {
                Some(Self {
                    $($field: {
                        let at = library.symbol($name, None)?;
                        // SAFETY: the driver's function of this (versioned) name has this signature.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> CUresult>(at.as_ptr())
                        }
                    },)*
                })
            }
        }
    };
}

pub(super) use group;

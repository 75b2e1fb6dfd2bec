//! What GDAKI's device code is given, read as it reads it.

mod device;
mod given;
mod refused;
mod view;

//! Packets.
use super::parameters;
parameters! {
    /// `[lb]`
    pub struct Lb {
        /// Method
        pub method: String,
    }
}

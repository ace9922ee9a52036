//! Connections while the pool changes.
use super::parameters;
parameters! {
    /// `[pcc]`
    pub struct Pcc {
        /// Method
        pub method: String,
    }
}

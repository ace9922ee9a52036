//! Connections placed by a load balancer, requests queued at cores.
use super::parameters;
parameters! {
    /// `[path]`
    pub struct Path {
        /// Method
        pub method: String,
    }
}

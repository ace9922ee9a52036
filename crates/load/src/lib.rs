//! An open-loop load generator, and the protocols that it speaks.
//!
//! * [`key_value`]: requests and responses of the testbed's key-value server (UDP); [`paced`]: of its paced server (TCP)
//! * [`request_type`]: kinds of requests, and how long each takes
//! * [`receive`]: when the kernel received something; [`event_loop`]: waiting

pub mod event_loop;
pub mod key_value;
pub mod paced;
pub mod receive;
pub mod request_type;

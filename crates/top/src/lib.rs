//! Implementation of `coreward top`, which shows the fleet's status live in the terminal.
//!
//! * [`model`]: the controller's newest answers, and rates computed from them
//! * [`view`]: order of the servers and scroll position
//! * [`page`]: drawing of a page from model and view
//! * [`terminal`]: terminal, keys and requests to the controller

pub mod model;
pub mod page;
pub mod terminal;
pub mod view;

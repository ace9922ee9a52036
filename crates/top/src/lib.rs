//! `coreward top`: what the controller knows, on a page in the terminal that follows it.
//!
//! * [`seen`]: what the controller has said, and the rates that come of it
//! * [`view`]: in which order, and from which server on
//! * [`page`]: the page; a function of the two
//! * [`terminal`]: keys in, pages out

pub mod model;
pub mod page;
pub mod terminal;
pub mod view;

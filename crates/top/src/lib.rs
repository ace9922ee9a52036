//! `coreward top`: live status in the terminal.
//!
//! * [`model`]: answers of the controller, and rates
//! * [`view`]: order and scrolling
//! * [`page`]: the page, a function of model and view
//! * [`terminal`]: keys and drawing

pub mod model;
pub mod page;
pub mod terminal;
pub mod view;

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

use coreward_config::{Span, TomlReader};

/// Set of values that must be unique in the document, each with the location of its first use.
pub struct UniqueValues<T> {
    value_name: &'static str,
    first_locations: HashMap<T, Span>,
}

impl<T: Hash + Eq + Display> UniqueValues<T> {
    pub fn new(value_name: &'static str) -> Self {
        Self { value_name, first_locations: HashMap::new() }
    }

    /// Inserts a value, or reports a mistake if it is a duplicate. An invalid value is `None`, which is ignored.
    pub fn insert(&mut self, value: Option<T>, span: &Span, reader: &mut TomlReader<'_>) {
        let Some(value) = value else { return };
        if let Some(first_location) = self.first_locations.get(&value) {
            let first_line = reader.line_number(first_location);
            let message =
                format!("{} {value} is used twice (first in line {first_line}): expected each once", self.value_name);
            reader.report_mistake(span.clone(), message);
            return;
        }
        self.first_locations.insert(value, span.clone());
    }
}

//! Reader of TOML configuration files. For each mistake it reports the file, line, column, key, found value and
//! expected value.
//!
//! [`config_struct!`] describes the keys, types ([`FromToml`]) and defaults of a file in one place, and generates
//!
//! * a parser, which continues after mistakes ([`TomlSource::read_as`]),
//! * a JSON schema for editors ([`build_file_schema`]).
//!
//! Combinations of values are checked after reading, with the same [`TomlReader`]. If it suffices that reading stops at
//! the first mistake, a file can be described by a serde struct ([`TomlSource::parse`]).

#![deny(missing_docs)]

mod bounded_duration;
mod diagnostic;
mod from_toml;
mod host;
mod macros;
mod model;
mod reader;
mod secret;
mod source;
#[cfg(test)]
mod tests;

pub use bounded_duration::{
    BoundedDuration, HOUR_NS, MICROSECOND_NS, MILLISECOND_NS, MINUTE_NS, SECOND_NS, format_duration,
};
pub use diagnostic::{ConfigDiagnostic, Diagnostics, find_nearest_name};
pub use from_toml::{
    BoundedInteger, FromToml, LocatedValue, PrintableName, choice_schema, parse_choice, parse_toml_string,
};
pub use host::{AbsolutePath, InterfaceName};
pub use reader::{TomlReader, TomlTableReader};
pub use secret::{Secret, SecretText, enable_secret_owner_check, read_secret};
pub use source::TomlSource;
pub use toml::Spanned;
#[doc(hidden)]
pub use {serde_json, toml};

use serde_json::{Value, json};

/// Location of a value in a file, as a range of bytes in its text.
pub type Span = std::ops::Range<usize>;

/// Returns the JSON schema of a configuration file (draft 7, which TOML editors use). `T` describes the file's keys.
pub fn build_file_schema<T: FromToml>(title: &str) -> Value {
    let mut schema = T::schema();
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!(title);
    schema
}

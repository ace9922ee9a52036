//! Reads TOML files. Every mistake names file, line, column, key, what was found and what was expected.
//!
//! A kind of file is described once, by [`config_struct!`]: keys, types, defaults and the new names of old
//! keys. Types of values are [`FromToml`]s. From that description comes
//!
//! * the parser, which goes on after a mistake and collects them all ([`Source::read_as`]),
//! * the JSON schema for editors ([`schema`]).
//!
//! What concerns several values (two services with one VIP) is checked after reading, by the same [`Reader`], so that
//! these mistakes stand in the same list.
//!
//! (Files whose readers stop at the first mistake can be plain serde structs: [`Source::parse`].)

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
mod time;

pub use diagnostic::{Diagnostic, Diagnostics, nearest};
pub use from_toml::{Field, FromToml, Name, Number, choice, choice_schema, parsed};
pub use host::{AbsolutePath, Interface};
pub use reader::{Reader, TableReader};
pub use secret::{Secret, SecretText, read_secret, refuse_others_secrets};
pub use source::Source;
pub use time::{HOUR, MICROSECOND, MILLISECOND, MINUTE, Period, SECOND, shown_time};
pub use toml::Spanned;
#[doc(hidden)]
pub use {serde_json, toml};

use serde_json::{Value, json};

/// Bytes of a file.
pub type Span = std::ops::Range<usize>;

/// The JSON schema (draft 7, which TOML editors know) of a kind of file.
pub fn schema<T: FromToml>(title: &str) -> Value {
    let mut schema = T::schema();
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!(title);
    schema
}

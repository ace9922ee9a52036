//! Trait for types that can be read from a TOML file, with implementations for common types.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::{DeInteger, DeValue};

use crate::{Span, TomlReader};

/// Type of a configuration value, which can be read from a TOML file.
pub trait FromToml: Sized {
    /// Whether a key of this type must be present in the file.
    const IS_KEY_REQUIRED: bool = true;

    /// Reads a value. If it is wrong, stores a mistake in the reader and returns `None`.
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self>;

    /// Returns a description of the valid values. It follows "expected" in diagnostics.
    fn describe_valid_values() -> String;

    /// Returns a JSON schema that accepts the same values as `read`.
    fn schema() -> Value;

    /// Returns the default for a key that is missing from the file, or `None` if the type has no default.
    fn value_if_missing() -> Option<Self> {
        None
    }

    /// Returns the value that replaces a wrong value so that reading can continue, or `None` if the type has none.
    fn value_after_error() -> Option<Self> {
        None
    }
}

/// Required value and its location. If the value is wrong or missing, the other keys of its table are still checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedValue<T> {
    /// Value from the file, or `None` if it is wrong or missing.
    pub value: Option<T>,
    /// Location of the value in the file, or `0..0` if the value is missing.
    pub span: Span,
}

impl<T: FromToml> FromToml for LocatedValue<T> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        Some(Self { value: T::read(value, reader), span: value.span() })
    }

    fn describe_valid_values() -> String {
        T::describe_valid_values()
    }

    fn schema() -> Value {
        T::schema()
    }

    fn value_if_missing() -> Option<Self> {
        Some(Self { value: None, span: 0..0 })
    }
}

impl<T: FromToml> FromToml for Option<T> {
    const IS_KEY_REQUIRED: bool = false;

    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        T::read(value, reader).map(Some)
    }

    fn describe_valid_values() -> String {
        T::describe_valid_values()
    }

    fn schema() -> Value {
        T::schema()
    }

    fn value_if_missing() -> Option<Self> {
        Some(None)
    }

    fn value_after_error() -> Option<Self> {
        Some(None)
    }
}

impl<T: FromToml> FromToml for Spanned<T> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        T::read(value, reader).map(|parsed_value| Spanned::new(value.span(), parsed_value))
    }

    fn describe_valid_values() -> String {
        T::describe_valid_values()
    }

    fn schema() -> Value {
        T::schema()
    }
}

/// Reads an array. Skips wrong elements, and stores a mistake in the reader for each of them.
impl<T: FromToml> FromToml for Vec<T> {
    const IS_KEY_REQUIRED: bool = false;

    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let DeValue::Array(values) = value.get_ref() else { return reader.report_wrong_type::<Self>(value) };
        Some(values.iter().filter_map(|value| T::read(value, reader)).collect())
    }

    fn describe_valid_values() -> String {
        format!("a list: each {}", T::describe_valid_values())
    }

    fn schema() -> Value {
        json!({ "type": "array", "items": T::schema() })
    }

    fn value_if_missing() -> Option<Self> {
        Some(Vec::new())
    }

    fn value_after_error() -> Option<Self> {
        Some(Vec::new())
    }
}

impl FromToml for bool {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        value.get_ref().as_bool().or_else(|| reader.report_wrong_type::<Self>(value))
    }

    fn describe_valid_values() -> String {
        "true or false".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "boolean" })
    }
}

impl FromToml for String {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        match value.get_ref() {
            DeValue::String(text) => Some(text.to_string()),
            _ => reader.report_wrong_type::<Self>(value),
        }
    }

    fn describe_valid_values() -> String {
        "a text in quotes".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

impl FromToml for PathBuf {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |path| match path {
            "" => Err(format!("an empty path: expected {}", Self::describe_valid_values())),
            path => Ok(PathBuf::from(path)),
        })
    }

    fn describe_valid_values() -> String {
        "a path in quotes".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "minLength": 1 })
    }
}

/// Number type that a TOML value can be converted to.
pub(crate) trait FromTomlScalar: Sized {
    /// Reads the number. If it is wrong, stores a mistake that describes the valid values of `T`, and returns `None`.
    fn parse_number<T: FromToml>(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self>;
}

impl FromTomlScalar for f64 {
    fn parse_number<T: FromToml>(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let number = match value.get_ref() {
            DeValue::Float(float) => float.as_str().replace('_', "").parse().ok(),
            DeValue::Integer(integer) => parse_integer_as_i64(integer).map(|integer| integer as f64),
            _ => None,
        };
        if number.is_none() {
            reader.report_wrong_type::<T>(value);
        }
        number
    }
}

impl FromToml for f64 {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        Self::parse_number::<Self>(value, reader)
    }

    fn describe_valid_values() -> String {
        "a number".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "number" })
    }
}

/// Returns the value of a TOML integer, or `None` if it does not fit into an `i64`.
fn parse_integer_as_i64(integer: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

impl FromTomlScalar for u64 {
    fn parse_number<T: FromToml>(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let integer =
            value.get_ref().as_integer().and_then(parse_integer_as_i64).and_then(|integer| u64::try_from(integer).ok());
        if integer.is_none() && value.get_ref().is_integer() {
            let source_text = reader.text_at(&value.span()).to_owned();
            reader.report_mistake(value.span(), format!("{source_text}: expected {}", T::describe_valid_values()));
        } else if integer.is_none() {
            reader.report_wrong_type::<T>(value);
        }
        integer
    }
}

impl FromToml for u64 {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        Self::parse_number::<Self>(value, reader)
    }

    fn describe_valid_values() -> String {
        "a whole number from 0 on".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "integer", "minimum": 0 })
    }
}

impl FromToml for usize {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        usize::try_from(u64::read(value, reader)?).ok()
    }

    fn describe_valid_values() -> String {
        u64::describe_valid_values()
    }

    fn schema() -> Value {
        u64::schema()
    }
}

/// Integer from `MIN` to `MAX`, both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoundedInteger<const MIN: u64, const MAX: u64>(pub u64);

impl<const MIN: u64, const MAX: u64> FromToml for BoundedInteger<MIN, MAX> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        match value.get_ref() {
            DeValue::Integer(integer) => {
                let unsigned_integer = parse_integer_as_i64(integer).and_then(|integer| u64::try_from(integer).ok());
                let number = unsigned_integer.filter(|number| (MIN..=MAX).contains(number)).map(Self);
                let source_text = reader.text_at(&value.span()).to_owned();
                reader.ok_or_report(
                    number.ok_or_else(|| format!("{source_text}: expected {}", Self::describe_valid_values())),
                    value.span(),
                )
            }
            _ => reader.report_wrong_type::<Self>(value),
        }
    }

    fn describe_valid_values() -> String {
        format!("a whole number from {MIN} to {MAX}")
    }

    fn schema() -> Value {
        json!({ "type": "integer", "minimum": MIN, "maximum": MAX })
    }
}

impl<const MIN: u64, const MAX: u64> BoundedInteger<MIN, MAX> {
    const FITS_32_BITS: () = assert!(MAX <= u32::MAX as u64);
}

impl<const MIN: u64, const MAX: u64> From<BoundedInteger<MIN, MAX>> for u32 {
    fn from(number: BoundedInteger<MIN, MAX>) -> Self {
        let () = BoundedInteger::<MIN, MAX>::FITS_32_BITS;
        number.0 as u32
    }
}

impl<const MIN: u64, const MAX: u64> From<BoundedInteger<MIN, MAX>> for usize {
    fn from(number: BoundedInteger<MIN, MAX>) -> Self {
        number.0 as usize
    }
}

/// Name without whitespace and control characters, which would make logs and tables unreadable.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrintableName(pub String);

/// Maximum length of a name in bytes.
const MAX_CONFIGURED_NAME_BYTES: usize = 64;

impl From<PrintableName> for String {
    fn from(name: PrintableName) -> Self {
        name.0
    }
}

impl FromToml for PrintableName {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |name| {
            let is_printable = name.chars().all(|c| !c.is_whitespace() && !c.is_control());
            match name.is_empty() || !is_printable || name.len() > MAX_CONFIGURED_NAME_BYTES {
                true => Err(format!("name {name:?}: expected {}", Self::describe_valid_values())),
                false => Ok(Self(name.to_owned())),
            }
        })
    }

    fn describe_valid_values() -> String {
        format!("1 to {MAX_CONFIGURED_NAME_BYTES} bytes without blanks")
    }

    fn schema() -> Value {
        json!({ "type": "string", "minLength": 1, "maxLength": MAX_CONFIGURED_NAME_BYTES, "pattern": r"^\S+$" })
    }
}

impl FromToml for Ipv4Addr {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        read_with_from_str(value, reader)
    }

    fn describe_valid_values() -> String {
        "an IPv4 address, as \"10.2.0.1\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^[0-9]+(\.[0-9]+){3}$" })
    }
}

impl FromToml for IpAddr {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        read_with_from_str(value, reader)
    }

    fn describe_valid_values() -> String {
        "an address, as \"10.2.0.1\" or \"2001:db8::1\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^([0-9]+(\.[0-9]+){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$" })
    }
}

impl FromToml for SocketAddr {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        read_with_from_str(value, reader)
    }

    fn describe_valid_values() -> String {
        "an address and a port, as \"10.1.0.1:7400\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": ":[0-9]+$" })
    }
}

fn read_with_from_str<T: FromToml + FromStr>(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<T> {
    parse_toml_string(value, reader, |text| {
        text.parse().map_err(|_| format!("{text:?}: expected {}", T::describe_valid_values()))
    })
}

/// Reads a TOML string and converts it with `parse`. If either fails, stores a mistake and returns `None`.
pub fn parse_toml_string<T: FromToml, E: Display>(
    value: &Spanned<DeValue<'_>>,
    reader: &mut TomlReader<'_>,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Option<T> {
    match value.get_ref() {
        DeValue::String(text) => reader.ok_or_report(parse(text), value.span()),
        _ => reader.report_wrong_type::<T>(value),
    }
}

/// Reads a TOML string that must be a name in `choices`, and returns that name's value. Otherwise, stores a mistake,
/// whose message begins with `subject`.
pub fn parse_choice<T: FromToml>(
    subject: &str,
    choices: Vec<(String, T)>,
    value: &Spanned<DeValue<'_>>,
    reader: &mut TomlReader<'_>,
) -> Option<T> {
    let DeValue::String(chosen_name) = value.get_ref() else { return reader.report_wrong_type::<T>(value) };
    let names: Vec<String> = choices.iter().map(|(name, _)| name.clone()).collect();
    let chosen_value = choices
        .into_iter()
        .find(|(name, _)| name.as_str() == chosen_name.as_ref())
        .map(|(_, choice_value)| choice_value);
    if chosen_value.is_none() {
        let message = format!("{subject} {chosen_name:?} is not known: expected {}", T::describe_valid_values());
        reader.report_unknown_name(value.span(), message, chosen_name, names.iter().map(String::as_str));
    }
    chosen_value
}

/// Returns the JSON schema of a string that must be one of `names`.
pub fn choice_schema(names: impl IntoIterator<Item = String>) -> Value {
    json!({ "type": "string", "enum": names.into_iter().collect::<Vec<_>>() })
}

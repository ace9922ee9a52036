//! Types for values that name parts of a machine, such as network devices and absolute paths.

use std::path::PathBuf;

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use crate::{FromToml, TomlReader, parse_toml_string};

/// Name of a network interface that Linux accepts (dev_valid_name() in net/core/dev.c).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceName(pub String);

/// Maximum length of an interface name, in bytes (IFNAMSIZ minus the terminating zero byte).
const MAX_INTERFACE_NAME_BYTES: usize = 15;

impl From<InterfaceName> for String {
    fn from(interface: InterfaceName) -> Self {
        interface.0
    }
}

impl FromToml for InterfaceName {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |name| {
            let has_valid_length = (1..=MAX_INTERFACE_NAME_BYTES).contains(&name.len());
            let is_forbidden_char = |c: char| c.is_whitespace() || c.is_control() || c == '/' || c == ':';
            match has_valid_length && !name.contains(is_forbidden_char) && name != "." && name != ".." {
                true => Ok(Self(name.to_owned())),
                false => Err(format!("interface {name:?}: expected {}", Self::describe_valid_values())),
            }
        })
    }

    fn describe_valid_values() -> String {
        format!("the name of a network device, 1 to {MAX_INTERFACE_NAME_BYTES} bytes, as \"eth0\"")
    }

    fn schema() -> Value {
        json!({ "type": "string", "minLength": 1, "maxLength": MAX_INTERFACE_NAME_BYTES, "pattern": r"^[^\s/:]+$" })
    }
}

/// File path that must be absolute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AbsolutePath(pub PathBuf);

impl From<AbsolutePath> for PathBuf {
    fn from(path: AbsolutePath) -> Self {
        path.0
    }
}

impl FromToml for AbsolutePath {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |path| match path.starts_with('/') {
            true => Ok(Self(PathBuf::from(path))),
            false => Err(format!("{path:?}: expected {}", Self::describe_valid_values())),
        })
    }

    fn describe_valid_values() -> String {
        "a path from the root on, as \"/sys/fs/bpf/coreward\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^/" })
    }
}

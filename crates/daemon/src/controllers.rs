//! The key `controller` in a daemon's configuration file, which is one address or a list of addresses.

use std::fmt;
use std::net::SocketAddr;

use coreward_config::toml::de::DeValue;
use coreward_config::{FromToml, Spanned, TomlReader, serde_json};
use serde_json::{Value, json};

/// Maximum number of controllers in a fleet.
const MAX_CONTROLLERS: usize = 16;

/// Distinct addresses of a fleet's controllers, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerAddresses(Vec<SocketAddr>);

impl ControllerAddresses {
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.0
    }
}

impl From<SocketAddr> for ControllerAddresses {
    fn from(address: SocketAddr) -> Self {
        Self(vec![address])
    }
}

impl fmt::Display for ControllerAddresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.0.iter().map(SocketAddr::to_string).collect();
        f.write_str(&addresses.join(", "))
    }
}

impl FromToml for ControllerAddresses {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        match value.get_ref() {
            DeValue::String(_) => SocketAddr::read(value, reader).map(Self::from),
            DeValue::Array(values) => {
                let mut addresses = Vec::with_capacity(values.len());
                let mut is_valid = true;
                for value in values {
                    match SocketAddr::read(value, reader) {
                        Some(address) if addresses.contains(&address) => {
                            reader.report_mistake(
                                value.span(),
                                format!("controller {address} is named twice: expected each once"),
                            );
                            is_valid = false;
                        }
                        Some(address) => addresses.push(address),
                        None => is_valid = false,
                    }
                }
                if is_valid && (addresses.is_empty() || addresses.len() > MAX_CONTROLLERS) {
                    let message = format!("{} controllers: expected 1 to {MAX_CONTROLLERS}", addresses.len());
                    reader.report_mistake(value.span(), message);
                    is_valid = false;
                }
                is_valid.then_some(Self(addresses))
            }
            _ => reader.report_wrong_type::<Self>(value),
        }
    }

    fn describe_valid_values() -> String {
        format!("{}, or a list of them", SocketAddr::describe_valid_values())
    }

    fn schema() -> Value {
        let address_schema = SocketAddr::schema();
        let list_schema = json!({
            "type": "array",
            "items": address_schema,
            "minItems": 1,
            "maxItems": MAX_CONTROLLERS,
            "uniqueItems": true
        });
        json!({ "anyOf": [address_schema, list_schema] })
    }
}

#[cfg(test)]
mod tests {
    use coreward_config::{TomlSource, config_struct};

    use super::*;

    config_struct! {
        struct ControllersFile {
            controller: ControllerAddresses,
        }
    }

    fn parse_controllers(value: &str) -> Result<String, String> {
        let source = TomlSource::from_text("lb.toml", &format!("controller = {value}\n"));
        let result = source.read_as(|file: ControllersFile, _| Some(file.controller.to_string()));
        result.map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn controller_key_accepts_address_or_list() {
        assert_eq!(parse_controllers("\"10.1.0.1:7400\"").unwrap(), "10.1.0.1:7400");
        assert_eq!(parse_controllers("[\"10.1.0.2:7400\", \"[::1]:7400\"]").unwrap(), "10.1.0.2:7400, [::1]:7400");
    }

    #[test]
    fn controller_key_diagnostics_show_expected_value() {
        let expected_address = "an address and a port, as \"10.1.0.1:7400\"";
        let cases = [
            ("\"10.1.0.1\"", format!("1:14: key `controller`: \"10.1.0.1\": expected {expected_address}")),
            ("[]", "1:14: key `controller`: 0 controllers: expected 1 to 16".to_owned()),
            ("[\"a:1\"]", format!("1:15: key `controller`: \"a:1\": expected {expected_address}")),
            (
                "[\"10.1.0.1:1\", \"10.1.0.1:1\"]",
                "1:29: key `controller`: controller 10.1.0.1:1 is named twice: expected each once".to_owned(),
            ),
            (
                "5",
                format!("1:14: key `controller`: 5 is a TOML integer: expected {expected_address}, or a list of them"),
            ),
        ];
        for (value, message) in cases {
            assert_eq!(parse_controllers(value).unwrap_err(), format!("lb.toml:{message}"));
        }
    }
}

//! Differences between two fleet documents, by server, service and key.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use coreward_config::TomlSource;
use coreward_config::toml::{Table, Value};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FleetDocumentChange {
    /// A server or a service was added.
    Added {
        /// "server" or "service", followed by the name.
        subject: String,
        /// Keys of the server or service other than its name, with their values.
        keys_and_values: Vec<(String, String)>,
    },
    /// A server or a service was removed.
    Removed { subject: String },
    Changed {
        /// "server" or "service", followed by the name. It is empty if a key of the whole fleet has changed.
        subject: String,
        key: String,
        /// Previous value of the key, or `None` if the key was absent.
        old: Option<String>,
        /// New value of the key, or `None` if the key is now absent.
        new: Option<String>,
    },
}

impl FleetDocumentChange {
    /// Returns the reason why the change breaks established connections, or `None` if it breaks none.
    pub fn reason_for_broken_connections(&self) -> Option<&'static str> {
        let (subject, key) = match self {
            Self::Removed { subject } if subject.starts_with("service ") => {
                return Some("its connections break: load balancers forward nothing to its address any more");
            }
            Self::Added { .. } | Self::Removed { .. } => return None,
            Self::Changed { subject, key, .. } => (subject, key.as_str()),
        };
        match (subject.split(' ').next()?, key) {
            ("service", "vip" | "protocol") => Some("connections to the old address break"),
            ("service", "consistency" | "timestamps") => {
                Some("established connections are found by the new way or break: expected few of them")
            }
            ("server", "address") => Some("its connections break: they go to the new address"),
            ("server", "id") => Some("its stamped connections break: they name the old id"),
            _ => None,
        }
    }
}

impl fmt::Display for FleetDocumentChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added { subject, keys_and_values: values } => {
                let key_value_pairs: Vec<String> =
                    values.iter().map(|(key, value)| format!("{key} = {value}")).collect();
                write!(f, "+ {subject}: {}", key_value_pairs.join(", "))
            }
            Self::Removed { subject } => write!(f, "- {subject}"),
            Self::Changed { subject, key, old, new } => {
                let subject = if subject.is_empty() { "fleet" } else { subject };
                let format_value = |value: &Option<String>| value.clone().unwrap_or_else(|| "(default)".to_owned());
                write!(f, "~ {subject}: {key} {} -> {}", format_value(old), format_value(new))
            }
        }
    }
}

/// Returns the changes from `old_source` to `new_source`, which must both be valid documents. The order of entries and
/// comments are ignored.
pub fn list_changes(old_source: &TomlSource, new_source: &TomlSource) -> Vec<FleetDocumentChange> {
    let [old, new] = [old_source, new_source].map(|source| source.parse::<Table>().unwrap_or_default());
    let mut changes = Vec::new();
    list_changed_keys("", &old, &new, &["server", "service"], &mut changes);
    for kind in ["server", "service"] {
        let [old, new] = [&old, &new].map(|document| entries_by_name(document, kind));
        let names: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
        for name in names {
            let subject = format!("{kind} {name}");
            match (old.get(name), new.get(name)) {
                (Some(old), Some(new)) => list_changed_keys(&subject, old, new, &[], &mut changes),
                (Some(_), None) => changes.push(FleetDocumentChange::Removed { subject }),
                (None, new) => changes.push(FleetDocumentChange::Added {
                    subject,
                    keys_and_values: new.map(|new| read_keys_and_values(new)).unwrap_or_default(),
                }),
            }
        }
    }
    changes
}

fn entries_by_name<'a>(document: &'a Table, kind: &str) -> BTreeMap<&'a str, &'a Table> {
    let entries = document.get(kind).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table);
    entries.filter_map(|entry| Some((entry.get("name")?.as_str()?, entry))).collect()
}

fn read_keys_and_values(entry: &Table) -> Vec<(String, String)> {
    let other_keys = entry.iter().filter(|(key, _)| *key != "name");
    other_keys.map(|(key, value)| (key.clone(), value.to_string())).collect()
}

fn list_changed_keys(
    subject: &str,
    old: &Table,
    new: &Table,
    ignored_keys: &[&str],
    changes: &mut Vec<FleetDocumentChange>,
) {
    let keys: BTreeSet<&String> =
        old.keys().chain(new.keys()).filter(|key| !ignored_keys.contains(&key.as_str())).collect();
    for key in keys {
        let (old, new) = (old.get(key), new.get(key));
        if old != new {
            let value_text = |value: Option<&Value>| value.map(Value::to_string);
            changes.push(FleetDocumentChange::Changed {
                subject: subject.to_owned(),
                key: key.clone(),
                old: value_text(old),
                new: value_text(new),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_servers_services_and_keys_are_listed() {
        let old = TomlSource::from_text(
            "old",
            "load_ewma_alpha = 0.5\n[[server]]\nname = \"s1\"\naddress = \"10.0.0.1\"\n[[server]]\nname = \
             \"s2\"\naddress = \"10.0.0.2\"\n\
             [[service]]\nname = \"web\"\nvip = \"10.1.0.1:80\"\nservers = [\"s1\"]\n",
        );
        let new = TomlSource::from_text(
            "new",
            "# Moved.\nmax_connection_lifetime = \"1h\"\n[[service]]\nname = \"web\"\nvip = \"10.1.0.1:80\"\nservers = \
             [\"s1\", \"s3\"]\n\
             [[server]]\nname = \"s3\"\naddress = \"10.0.0.3\"\nweight = 2\n\
             [[server]]\nname = \"s1\"\naddress = \"10.0.0.1\"\nstate = \"draining\"\nracks = [\"r1\"]\n",
        );
        let change_texts: Vec<String> = list_changes(&old, &new).iter().map(FleetDocumentChange::to_string).collect();
        assert_eq!(
            change_texts,
            [
                "~ fleet: load_ewma_alpha 0.5 -> (default)",
                "~ fleet: max_connection_lifetime (default) -> \"1h\"",
                "~ server s1: racks (default) -> [\"r1\"]",
                "~ server s1: state (default) -> \"draining\"",
                "- server s2",
                "+ server s3: address = \"10.0.0.3\", weight = 2",
                "~ service web: servers [\"s1\"] -> [\"s1\", \"s3\"]",
            ]
        );
        assert_eq!(list_changes(&old, &old), []);
    }

    #[test]
    fn changes_that_break_connections_have_a_reason() {
        let new_document = |server: &str, services: &str| {
            TomlSource::from_text("fleet", &format!("[[server]]\nname = \"s1\"\n{server}\n{services}"))
        };
        let web_service_toml = |keys: &str| format!("[[service]]\nname = \"web\"\n{keys}\n");
        let old_document =
            new_document("address = \"10.0.0.1\"\nid = 1", &web_service_toml("vip = \"10.1.0.1:80\"\npolicy = \"rr\""));
        let find_break_reasons = |server: &str, services: &str| {
            let changes = list_changes(&old_document, &new_document(server, services));
            changes
                .iter()
                .filter(|change| change.reason_for_broken_connections().is_some())
                .map(FleetDocumentChange::to_string)
                .collect::<Vec<_>>()
        };
        let (unchanged_keys, vip) = ("address = \"10.0.0.1\"\nid = 1", "vip = \"10.1.0.1:80\"\n");
        assert_eq!(find_break_reasons(unchanged_keys, ""), ["- service web"]);
        assert_eq!(find_break_reasons(unchanged_keys, &web_service_toml("vip = \"10.1.0.2:80\"")).len(), 1);
        assert_eq!(
            find_break_reasons(unchanged_keys, &web_service_toml(&format!("{vip}consistency = \"stateful\""))).len(),
            1
        );
        assert_eq!(find_break_reasons("address = \"10.0.0.2\"\nid = 2", &web_service_toml(vip)).len(), 2);
        assert_eq!(find_break_reasons("address = \"10.0.0.1\"\nid = 1\nweight = 2", &web_service_toml(vip)), [""; 0]);
    }
}

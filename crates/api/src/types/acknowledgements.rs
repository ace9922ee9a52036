//! Who has a configuration in force.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Who has the newest configuration in force: of load balancers that are alive, and of agents that are connected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledgements {
    /// Of the newest configuration.
    pub configuration_generation: u64,
    /// That have it in force, but for what they refuse.
    pub acknowledged_count: u64,
    /// That have not said so.
    pub waiting_count: u64,
    /// The first 100 of them.
    pub waiting: Vec<Waiting>,
    /// What cannot be used somewhere: what was in force there before stays so.
    pub refused_count: u64,
    /// The first 100 of that.
    pub refused: Vec<RefusedUpdate>,
    /// Load balancers that are not connected and not forgotten: each forwards by the configuration that it has.
    #[serde(default)]
    pub lost: Vec<Waiting>,
}

/// One that has not said that the newest configuration is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Waiting {
    /// "lb" or "agent".
    pub part: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// The newest that it has; 0: none.
    pub configuration_generation: u64,
}

/// Something of an update that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedUpdate {
    /// "lb" or "agent".
    pub part: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// "configuration" or "table".
    pub what: String,
    /// Name of the service; null: all of the update.
    pub service: Option<String>,
    /// Of the configuration or the table; 0: not known.
    pub generation: u64,
    /// What is wrong.
    pub reason: String,
}

/// Services that a line names; more are counted.
const NAMED_SERVICES: usize = 3;

impl RefusedUpdate {
    /// A line for all that a part refuses for one reason: "lb lb1 refuses configuration 5 of services a, b: ...".
    pub fn lines(refused: &[Self]) -> Vec<String> {
        let mut services: BTreeMap<_, Vec<&str>> = BTreeMap::new();
        for Self { part, name, what, service, generation, reason } in refused {
            // A kernel's log of a program may be long; the API has all of it.
            let reason = reason.lines().next().unwrap_or_default();
            let alike = services.entry((part, name, what, *generation, reason)).or_default();
            alike.extend(service.as_deref());
        }
        let line = |((part, name, what, generation, reason), services): ((_, _, _, _, _), Vec<&str>)| {
            let subject = format!("{part} {name}");
            format!("{} refuses {what} {generation}{}: {reason}", subject.trim_end(), list_services(&services))
        };
        services.into_iter().map(line).collect()
    }
}

fn list_services(services: &[&str]) -> String {
    let named = services.get(..NAMED_SERVICES).unwrap_or(services).join(", ");
    match services.len() {
        0 => String::new(),
        1 => format!(" of service {named}"),
        2..=NAMED_SERVICES => format!(" of services {named}"),
        all => format!(" of services {named} and {} more", all - NAMED_SERVICES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(what: &str, service: Option<&str>, reason: &str) -> RefusedUpdate {
        let (part, name, what) = ("lb".to_owned(), "lb1".to_owned(), what.to_owned());
        RefusedUpdate {
            part,
            name,
            what,
            service: service.map(str::to_owned),
            generation: 5,
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn refusals_of_one_reason_are_one_line() {
        let many: Vec<String> = (0..43).map(|number| format!("web{number}")).collect();
        let mut all: Vec<RefusedUpdate> =
            many.iter().map(|service| refused("configuration", Some(service), "mode \"new\"")).collect();
        all.push(refused("configuration", None, "no memory\nlibbpf: a log\nof many lines"));
        all.push(refused("table", Some("web0"), "too large"));
        assert_eq!(
            RefusedUpdate::lines(&all),
            [
                "lb lb1 refuses configuration 5 of services web0, web1, web2 and 40 more: mode \"new\"",
                "lb lb1 refuses configuration 5: no memory",
                "lb lb1 refuses table 5 of service web0: too large",
            ]
        );
    }
}

//! Acknowledgements of configurations by load balancers and agents.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Acknowledgements of the newest configuration by peers, which are live load balancers and connected agents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acknowledgements {
    /// Generation of the newest configuration.
    pub configuration_generation: u64,
    /// Number of peers that have applied the newest configuration, except for rejected parts.
    pub acknowledged_count: u64,
    /// Number of peers that have not confirmed the newest configuration.
    pub pending_count: u64,
    /// The first 100 peers that have not confirmed the newest configuration.
    pub pending_peers: Vec<PeerGeneration>,
    /// Number of rejected parts of updates. The peers continue to use the previous versions of these parts.
    pub rejected_count: u64,
    /// The first 100 rejected parts of updates.
    pub rejected: Vec<RejectedUpdate>,
    /// Load balancers that are disconnected but not forgotten. Each forwards packets by its last configuration.
    #[serde(default)]
    pub disconnected_load_balancers: Vec<PeerGeneration>,
}

/// Load balancer or agent (peer) that has not confirmed the newest configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerGeneration {
    /// Kind of the peer: "lb" or "agent".
    pub component: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// Generation of the newest configuration that the peer has confirmed, or 0 if it has confirmed none.
    pub configuration_generation: u64,
}

/// Part of a configuration or table update that a load balancer or agent (peer) has rejected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RejectedUpdate {
    /// Kind of the peer: "lb" or "agent".
    pub component: String,
    /// Name of the load balancer or server.
    pub name: String,
    /// Kind of the rejected part: "configuration" or "table".
    pub update_kind: String,
    /// Name of the service, or null if the whole update was rejected.
    pub service: Option<String>,
    /// Generation of the rejected configuration or table, or 0 if it is unknown.
    pub generation: u64,
    /// Reason for the rejection.
    pub reason: String,
}

/// Maximum number of service names in one summary line. Further services are only counted.
const MAX_SERVICES_NAMED_PER_LINE: usize = 3;

impl RejectedUpdate {
    /// Returns one line for each group of rejections with the same peer and reason, such as "lb lb1 rejects
    /// configuration 5 of services a, b: ...".
    pub fn summary_lines(rejected_updates: &[Self]) -> Vec<String> {
        let mut services_by_rejection: BTreeMap<_, Vec<&str>> = BTreeMap::new();
        for Self { component: part, name, update_kind: kind, service, generation, reason } in rejected_updates {
            // A kernel log about a BPF program may be long, so only its first line is shown. The API returns all of it.
            let reason = reason.lines().next().unwrap_or_default();
            let rejected_services = services_by_rejection.entry((part, name, kind, *generation, reason)).or_default();
            rejected_services.extend(service.as_deref());
        }
        let format_line =
            |((component, name, kind, generation, reason), service_names): ((_, _, _, _, _), Vec<&str>)| {
                let subject = format!("{component} {name}");
                format!(
                    "{} rejects {kind} {generation}{}: {reason}",
                    subject.trim_end(),
                    format_service_list(&service_names)
                )
            };
        services_by_rejection.into_iter().map(format_line).collect()
    }
}

fn format_service_list(service_names: &[&str]) -> String {
    let named_services = service_names.get(..MAX_SERVICES_NAMED_PER_LINE).unwrap_or(service_names).join(", ");
    match service_names.len() {
        0 => String::new(),
        1 => format!(" of service {named_services}"),
        2..=MAX_SERVICES_NAMED_PER_LINE => format!(" of services {named_services}"),
        all => format!(" of services {named_services} and {} more", all - MAX_SERVICES_NAMED_PER_LINE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build_rejected_update(kind: &str, service: Option<&str>, reason: &str) -> RejectedUpdate {
        let (part, name, kind) = ("lb".to_owned(), "lb1".to_owned(), kind.to_owned());
        RejectedUpdate {
            component: part,
            name,
            update_kind: kind,
            service: service.map(str::to_owned),
            generation: 5,
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn rejections_with_the_same_reason_share_a_summary_line() {
        let service_names: Vec<String> = (0..43).map(|number| format!("web{number}")).collect();
        let mut rejected_updates: Vec<RejectedUpdate> = service_names
            .iter()
            .map(|service| build_rejected_update("configuration", Some(service), "mode \"new\""))
            .collect();
        rejected_updates.push(build_rejected_update("configuration", None, "no memory\nlibbpf: a log\nof many lines"));
        rejected_updates.push(build_rejected_update("table", Some("web0"), "too large"));
        assert_eq!(
            RejectedUpdate::summary_lines(&rejected_updates),
            [
                "lb lb1 rejects configuration 5 of services web0, web1, web2 and 40 more: mode \"new\"",
                "lb lb1 rejects configuration 5: no memory",
                "lb lb1 rejects table 5 of service web0: too large",
            ]
        );
    }
}

//! Consistency mode of a service: valid combinations of `protocol`, `consistency`, `timestamps`, `udp` and `policy`.

use coreward_config::{Reader, Spanned};
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::policy;
use coreward_model::tuple::Protocol;

use super::file::{PolicyName, Service, UdpMode};

/// Returns the service's mode; mistakes are on the reader's list.
pub fn of(service: &Service, protocol: Protocol, reader: &mut Reader<'_>) -> ServiceMode {
    let mode = match protocol {
        Protocol::Tcp => tcp_mode(service, reader),
        Protocol::Udp => udp_mode(service, reader),
    };
    let Some(written) = &service.forwarding else { return mode };
    let forwarding = *written.get_ref();
    if forwarding.encapsulates() && mode.timestamps == Timestamps::LoadBalancer {
        let message = format!(
            "forwarding {:?} with timestamps by \"lb\", whose servers' answers must pass the load balancer: expected \
             \"l2\", or timestamps by \"server\" or \"off\"",
            forwarding.name()
        );
        reader.mistake(written.span(), message);
    }
    ServiceMode { forwarding, ..mode }
}

/// Adds what an IPv6 VIP does not allow to the reader's list.
pub fn check_ipv6(service: &Service, reader: &mut Reader<'_>) {
    if let Some(migration) = service.migrate_from.as_ref().or(service.migrate_to.as_ref()) {
        let message = "an IPv6 VIP with a migration: expected neither `migrate_from` nor `migrate_to`";
        reader.mistake(migration.span(), message);
    }
}

fn udp_mode(service: &Service, reader: &mut Reader<'_>) -> ServiceMode {
    let spans = [
        ("consistency", service.consistency.as_ref().map(Spanned::span)),
        ("timestamps", service.timestamps.as_ref().map(Spanned::span)),
    ];
    for (key, span) in spans {
        let Some(span) = span else { continue };
        let message = format!(
            "a UDP service has no `{key}`, as datagrams carry no cookie: expected `udp = \"flow\"` or `udp = \"packet\"`"
        );
        reader.mistake(span, message);
    }
    let default = ServiceMode::default_for(Protocol::Udp);
    match service.udp.as_ref().map(Spanned::get_ref) {
        None => default,
        Some(UdpMode::Flow) => ServiceMode { consistency: Consistency::HashTable, ..default },
        Some(UdpMode::Packet) => ServiceMode { consistency: Consistency::None, ..default },
    }
}

fn tcp_mode(service: &Service, reader: &mut Reader<'_>) -> ServiceMode {
    if let Some(udp) = &service.udp {
        reader.mistake(udp.span(), "a TCP service has no `udp`: expected it with `protocol = \"udp\"` only");
    }
    let default = ServiceMode::default_for(Protocol::Tcp);
    let consistency = service.consistency.as_ref().map_or(default.consistency, |consistency| *consistency.get_ref());
    let uses_cookies = matches!(consistency, Consistency::Stateless | Consistency::Stateful);
    let timestamps = match &service.timestamps {
        None if uses_cookies => default.timestamps,
        None => Timestamps::Off,
        Some(timestamps) => {
            let requested = *timestamps.get_ref();
            if let Some(message) = cannot_stamp(consistency, uses_cookies, requested) {
                reader.mistake(timestamps.span(), message);
            }
            requested
        }
    };
    if let (Consistency::None, Some(written)) = (consistency, &service.consistency) {
        refuse_wandering(written, service, reader);
    }
    ServiceMode { consistency, timestamps, ..default }
}

/// Returns the reason why the service cannot have these timestamps.
fn cannot_stamp(consistency: Consistency, uses_cookies: bool, requested: Timestamps) -> Option<String> {
    let name = consistency.name();
    if !uses_cookies && requested != Timestamps::Off {
        return Some(format!(
            "timestamps by {:?} with consistency {name:?}, which uses no cookie: expected \"off\"",
            requested.name()
        ));
    }
    // Only the server learns the index, from the SYN. The cookie of LB-side stamping has no room for an index next to
    // 20 bits of time.
    (consistency == Consistency::Stateful && requested != Timestamps::Server).then(|| {
        format!(
            "timestamps by {:?} with consistency {name:?}: expected \"server\", who stamps the index",
            requested.name()
        )
    })
}

/// Without a consistency mode a connection stays with its server only while the policy's choice does.
fn refuse_wandering<T>(consistency: &Spanned<T>, service: &Service, reader: &mut Reader<'_>) {
    let Some(PolicyName(chosen)) = service.policy.value else { return };
    let fixed = policy::fixed_names();
    if fixed.contains(&chosen) {
        return;
    }
    let message = format!(
        "consistency \"none\" with policy {chosen:?}, which would send a connection's packets to several servers: expected \
         a policy whose choice depends on the pool alone: {}",
        fixed.join(", ")
    );
    reader.mistake(consistency.span(), message);
}

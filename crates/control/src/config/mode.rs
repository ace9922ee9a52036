//! How a service's packets find their server: what `protocol`, `consistency`, `timestamps`, `udp` and `policy` may say
//! together.

use coreward_config::{ConfigError, Source, Spanned};
use coreward_model::consistency::{Consistency, ServiceMode, Timestamps};
use coreward_model::policy;
use coreward_model::tuple::Protocol;

use super::file::{Service, UdpMode};

/// The service's mode.
///
/// # Errors
/// When its keys do not go together.
pub fn of(source: &Source, service: &Service, protocol: Protocol) -> Result<ServiceMode, ConfigError> {
    match protocol {
        Protocol::Tcp => of_tcp(source, service),
        Protocol::Udp => of_udp(source, service),
    }
}

fn of_udp(source: &Source, service: &Service) -> Result<ServiceMode, ConfigError> {
    let only_tcp = |key: &str| {
        format!(
            "a UDP service has no `{key}`, as datagrams carry no cookie: expected `udp = \"flow\"` or `udp = \"packet\"`"
        )
    };
    if let Some(consistency) = &service.consistency {
        return Err(source.error(consistency.span(), &only_tcp("consistency")));
    }
    if let Some(timestamps) = &service.timestamps {
        return Err(source.error(timestamps.span(), &only_tcp("timestamps")));
    }
    let default = ServiceMode::default_for(Protocol::Udp);
    Ok(match service.udp.as_ref().map(Spanned::get_ref) {
        None => default,
        Some(UdpMode::Flow) => ServiceMode { consistency: Consistency::HashTable, ..default },
        Some(UdpMode::Packet) => ServiceMode { consistency: Consistency::None, ..default },
    })
}

fn of_tcp(source: &Source, service: &Service) -> Result<ServiceMode, ConfigError> {
    if let Some(udp) = &service.udp {
        return Err(source.error(udp.span(), "a TCP service has no `udp`: expected it with `protocol = \"udp\"` only"));
    }
    let default = ServiceMode::default_for(Protocol::Tcp);
    let consistency = service.consistency.as_ref().map_or(default.consistency, |consistency| consistency.get_ref().0);
    let uses_cookies = matches!(consistency, Consistency::Stateless | Consistency::Stateful);
    let timestamps = match &service.timestamps {
        None if uses_cookies => default.timestamps,
        None => Timestamps::Off,
        Some(timestamps) => {
            let wanted = timestamps.get_ref().0;
            if let Some(message) = cannot_stamp(consistency, uses_cookies, wanted) {
                return Err(source.error(timestamps.span(), &message));
            }
            wanted
        }
    };
    if let (Consistency::None, Some(written)) = (consistency, &service.consistency) {
        refuse_wandering(source, written, service)?;
    }
    Ok(ServiceMode { consistency, timestamps })
}

/// Why the service cannot have these timestamps, if it cannot.
fn cannot_stamp(consistency: Consistency, uses_cookies: bool, wanted: Timestamps) -> Option<String> {
    let name = consistency.name();
    if !uses_cookies && wanted != Timestamps::Off {
        return Some(format!(
            "timestamps by {:?} with consistency {name:?}, which uses no cookie: expected \"off\"",
            wanted.name()
        ));
    }
    // The server learns the index from the SYN and stamps it: nobody else can, and without a stamp nobody reads it. (The
    // load balancer's own cookie has no room for an index beside 20 bits of time.)
    (consistency == Consistency::Stateful && wanted != Timestamps::Server).then(|| {
        format!(
            "timestamps by {:?} with consistency {name:?}: expected \"server\", who stamps the index",
            wanted.name()
        )
    })
}

/// With no consistency at all, a connection stays with its server only while the rule's choice does.
fn refuse_wandering<T>(source: &Source, consistency: &Spanned<T>, service: &Service) -> Result<(), ConfigError> {
    let chosen = service.policy.as_ref().map_or(policy::DEFAULT, |policy| policy.get_ref().0.0);
    let fixed = policy::fixed_names();
    if fixed.contains(&chosen) {
        return Ok(());
    }
    let message = format!(
        "consistency \"none\" with policy {chosen:?}, which would send a connection's packets to several servers: expected \
         a policy whose choice depends on the pool alone: {}",
        fixed.join(", ")
    );
    Err(source.error(consistency.span(), &message))
}

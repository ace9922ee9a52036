//! What concerns several values of the file.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use coreward_config::{ConfigError, Source, Spanned};
use coreward_model::consistency::Timestamps;
use coreward_model::correction;
use coreward_model::load::Alpha;
use coreward_model::placement::BucketCount;
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, policy};
use coreward_wire::ServiceIndex;

use super::file::{File, RotationInterval, Server, Service};
use super::{
    Config, DEFAULT_REPORT_INTERVAL, DEFAULT_RETIRE_AFTER, ServerConfig, ServerState, ServiceConfig, Span, mode,
};

pub fn check(source: Source) -> Result<Config, ConfigError> {
    let file: File = source.parse()?;
    let checker = Checker { source: &source };
    let servers = checker.servers(&file.servers)?;
    let services = checker.services(&file, &servers)?;
    let retire_after = file.retire_after_s.map_or(DEFAULT_RETIRE_AFTER, |seconds| Duration::from_secs(seconds.into()));
    Ok(Config {
        listen: file.listen,
        store: file.store,
        report_interval: file.report_interval_ms.map_or(DEFAULT_REPORT_INTERVAL, |interval| interval.0),
        alpha: file.alpha.map_or(Alpha::PUBLISHED, |alpha| alpha.0),
        rss_key: file.rss_key.map(|key| key.0),
        retire_after,
        key_rotation: file.key_rotation_hours.map(|interval| checker.rotation(&interval, retire_after)).transpose()?,
        servers,
        services,
        source,
    })
}

struct Checker<'a> {
    source: &'a Source,
}

impl Checker<'_> {
    /// A second rotation overwrites the key of before the first: whoever still has a cookie of it must be gone.
    fn rotation(&self, interval: &Spanned<RotationInterval>, retire_after: Duration) -> Result<Duration, ConfigError> {
        let RotationInterval(wanted) = *interval.get_ref();
        if wanted >= retire_after {
            return Ok(wanted);
        }
        let message = format!(
            "a key rotation every {} h, but a cookie may live {} s (`retire_after_s`): expected no less than that",
            wanted.as_secs() / 3600,
            retire_after.as_secs()
        );
        Err(self.source.error(interval.span(), &message))
    }

    fn servers(&self, listed: &[Spanned<Server>]) -> Result<Vec<ServerConfig>, ConfigError> {
        if let Some(first_too_many) = listed.get(ServerId::COUNT) {
            let message =
                format!("{} servers: expected at most {}, all that a cookie holds", listed.len(), ServerId::COUNT);
            return Err(self.source.error(first_too_many.span(), &message));
        }
        let mut names = Once::new(self.source, "server name");
        let mut addresses = Once::new(self.source, "server address");
        let mut ids = Once::new(self.source, "server id");
        let mut servers = Vec::with_capacity(listed.len());
        for entry in listed {
            let server = entry.get_ref();
            names.take(&server.name.get_ref().0, server.name.span())?;
            let address = server.address.get_ref().0.0;
            addresses.take(address, server.address.span())?;
            let id = server.id.as_ref().map(|id| (id.get_ref().0, id.span()));
            if let Some((id, span)) = &id {
                ids.take(*id, span.clone())?;
            }
            servers.push(ServerConfig {
                name: server.name.get_ref().0.clone(),
                address,
                id,
                state: server.state.unwrap_or(ServerState::Active),
                weight: server.weight.as_ref().map(|weight| weight.0).unwrap_or_default(),
                capacity: server.capacity.as_ref().map(|capacity| capacity.0),
                span: entry.span(),
            });
        }
        Ok(servers)
    }

    fn services(&self, file: &File, servers: &[ServerConfig]) -> Result<Vec<ServiceConfig>, ConfigError> {
        if let Some(first_too_many) = file.services.get(ServiceIndex::COUNT) {
            let message = format!("{} services: expected at most {}", file.services.len(), ServiceIndex::COUNT);
            return Err(self.source.error(first_too_many.span(), &message));
        }
        let positions: HashMap<&str, usize> =
            servers.iter().enumerate().map(|(position, server)| (server.name.as_str(), position)).collect();
        let mut names = Once::new(self.source, "service name");
        let mut vips = Once::new(self.source, "VIP");
        let mut services = Vec::with_capacity(file.services.len());
        for entry in &file.services {
            let service = entry.get_ref();
            names.take(&service.name.get_ref().0, service.name.span())?;
            let protocol = service.protocol.as_ref().map_or(Protocol::Tcp, |protocol| protocol.0);
            let address = service.vip.get_ref().0.with(protocol);
            vips.take(address, service.vip.span())?;
            self.no_server_has(address.socket.ip(), servers, service.vip.span())?;
            let mode = mode::of(self.source, service, protocol)?;
            let pool = self.pool(service, &positions)?;
            if mode.timestamps == Timestamps::LoadBalancer {
                self.can_be_named(&service.name.get_ref().0, pool.iter().map(|position| &servers[*position]))?;
            }
            services.push(ServiceConfig {
                name: service.name.get_ref().0.clone(),
                address,
                mode,
                policy: service.policy.as_ref().map_or(policy::DEFAULT, |policy| policy.get_ref().0.0),
                slow_start: service.slow_start_s.as_ref().map_or(Duration::ZERO, |slow_start| slow_start.0),
                buckets: service
                    .buckets
                    .as_ref()
                    .or(file.buckets.as_ref())
                    .map_or(BucketCount::PUBLISHED, |buckets| buckets.0),
                servers: pool,
                span: entry.span(),
            });
        }
        Ok(services)
    }

    /// A VIP stands silenced on every server's loopback: as a server's own address it could not be reached.
    fn no_server_has(&self, vip: std::net::IpAddr, servers: &[ServerConfig], span: Span) -> Result<(), ConfigError> {
        let Some(server) = servers.iter().find(|server| server.address == vip) else {
            return Ok(());
        };
        let message =
            format!("VIP {vip} is also the address of server {:?}: expected an address of its own", server.name);
        Err(self.source.error(span, &message))
    }

    /// The cookie that a load balancer stamps itself has less room for ids.
    fn can_be_named<'a>(&self, service: &str, pool: impl Iterator<Item = &'a ServerConfig>) -> Result<(), ConfigError> {
        for (id, span) in pool.filter_map(|server| server.id.as_ref()) {
            if !correction::can_name(*id) {
                let message = format!(
                    "server id {id} in service {service:?}, whose timestamps are by \"lb\": expected 0 to {}, the bits that \
                     its cookies hold, or none to have one drawn",
                    correction::SERVER_IDS - 1
                );
                return Err(self.source.error(span.clone(), &message));
            }
        }
        Ok(())
    }

    /// Positions of a service's servers; all of them when it names none.
    fn pool(&self, service: &Service, positions: &HashMap<&str, usize>) -> Result<Vec<usize>, ConfigError> {
        let Some(listed) = &service.servers else {
            return Ok((0..positions.len()).collect());
        };
        let mut members = Once::new(self.source, "server of this service");
        let mut pool = Vec::with_capacity(listed.len());
        for name in listed {
            members.take(name.get_ref(), name.span())?;
            let Some(position) = positions.get(name.get_ref().as_str()) else {
                let message = format!("server {:?} does not exist: expected the name of a [[server]]", name.get_ref());
                return Err(self.source.error(name.span(), &message));
            };
            pool.push(*position);
        }
        Ok(pool)
    }
}

/// Values that may stand in the file once.
struct Once<'a, T> {
    source: &'a Source,
    what: &'static str,
    seen: HashMap<T, Span>,
}

impl<'a, T: Hash + Eq + std::fmt::Display> Once<'a, T> {
    fn new(source: &'a Source, what: &'static str) -> Self {
        Self { source, what, seen: HashMap::new() }
    }

    fn take(&mut self, value: T, span: Span) -> Result<(), ConfigError> {
        if let Some(first) = self.seen.get(&value) {
            let line = self.source.line(first);
            let message = format!("{} {value} is used twice (first in line {line}): expected each once", self.what);
            return Err(self.source.error(span, &message));
        }
        self.seen.insert(value, span);
        Ok(())
    }
}

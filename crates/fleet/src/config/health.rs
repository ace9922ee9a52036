//! Health checks of a service's servers, as the table `[service.health]` configures them.

use std::net::Ipv6Addr;

use coreward_config::toml::de::DeValue;
use coreward_config::{
    BoundedDuration, BoundedInteger, FromToml, HOUR_NS, MILLISECOND_NS, MINUTE_NS, Span, Spanned, TomlReader,
    config_struct, parse_toml_string, serde_json, string_enum,
};
use coreward_model::consistency::{CookieStamper, ServiceSettings};
use coreward_model::health::{
    CertificateVerification, HealthCheck, HealthCheckJitter, HealthProbe, HealthVerdictThresholds, HttpProbe,
    HttpStatusRange, ProbeAddress,
};
use coreward_model::tuple::TransportProtocol;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::{Value, json};

config_struct! {
    /// Table `[service.health]`, which describes the health checks of a service.
    pub struct HealthCheckTable {
        /// Kind of health check.
        pub check: HealthCheckKind = HealthCheckKind::Tcp,
        /// Address to which checks are sent: "vip", or "server" for the server's own address.
        pub at: Option<Spanned<ProbeAddress>>,
        /// Port to which checks are sent. By default, the service's port.
        pub port: Option<Spanned<BoundedInteger<1, 65535>>>,
        /// Maximum time between the starts of two checks.
        pub interval: BoundedDuration<{ 100 * MILLISECOND_NS }, HOUR_NS> =
            BoundedDuration(DEFAULT_HEALTH_CHECK_INTERVAL),
        /// Maximum time until an answer, after which a check counts as failed.
        pub timeout: BoundedDuration<{ 10 * MILLISECOND_NS }, MINUTE_NS> =
            BoundedDuration(DEFAULT_HEALTH_CHECK_TIMEOUT),
        /// Number of consecutive successes after which a down server counts as up.
        pub rise: BoundedInteger<1, 100> = BoundedInteger(2),
        /// Number of consecutive failures after which a server counts as down.
        pub fall: BoundedInteger<1, 100> = BoundedInteger(3),
        /// Maximum fraction of the interval by which a check may start early, so that checks spread out.
        pub jitter: HealthCheckJitter = HealthCheckJitter::new(0.1).expect("from 0 to 1"),
        /// http, https: path and query of the request. By default, "/".
        pub path: Option<Spanned<HttpPath>>,
        /// http, https: `Host` header, and name that the certificate must have. By default, the address of the
        /// check.
        pub host: Option<Spanned<HttpHost>>,
        /// http, https: status codes with which the check passes. By default, "200-399".
        pub expect: Option<Spanned<HttpStatusRange>>,
        /// https: certificates of the authorities that may have signed the server's certificate (PEM). By default, the
        /// authorities that the load balancer's system trusts.
        pub ca: Option<Spanned<CertificateAuthorities>>,
        /// https: whether the server's certificate is verified. With false, any certificate is accepted.
        pub verify: Option<Spanned<bool>>,
    }
}

const DEFAULT_HEALTH_CHECK_INTERVAL: std::time::Duration = std::time::Duration::from_secs(2);
const DEFAULT_HEALTH_CHECK_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(1);

/// Kind of a health check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthCheckKind {
    /// The server is healthy if it accepts a TCP connection.
    Tcp,
    /// The server is healthy if it answers an HTTP request with an expected status.
    Http,
    /// The server is healthy if it answers an HTTPS request with an expected status.
    Https,
    /// The server is healthy if its agent sends reports.
    Agent,
    /// There is no check, so the server always counts as healthy.
    None,
}

impl HealthCheckKind {
    const ALL: [(&str, Self); 5] = [
        ("tcp", Self::Tcp),
        ("http", Self::Http),
        ("https", Self::Https),
        ("agent", Self::Agent),
        ("none", Self::None),
    ];

    fn opens_connections(self) -> bool {
        matches!(self, Self::Tcp | Self::Http | Self::Https)
    }

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

string_enum!(HealthCheckKind, "check", HealthCheckKind::ALL.map(|(name, kind)| (name.to_owned(), kind)));

/// Path and optional query, as in the request line of an HTTP request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpPath(String);

impl FromToml for HttpPath {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |path| {
            match path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic()) {
                true => Ok(Self(path.to_owned())),
                false => Err(format!("path {path:?}: expected {}", Self::describe_valid_values())),
            }
        })
    }

    fn describe_valid_values() -> String {
        "a path that begins with a slash, without blanks, as \"/healthz\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "^/[!-~]*$" })
    }
}

/// Returns whether the text is a host name or address with an optional port (RFC 3986, section 3.2).
fn is_host_and_port(text: &str) -> bool {
    let (is_host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => (address.parse::<Ipv6Addr>().is_ok(), port),
        None => {
            let (name, port) = text.split_at(text.find(':').unwrap_or(text.len()));
            let is_allowed_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            (!name.is_empty() && name.bytes().all(is_allowed_byte), port)
        }
    };
    let is_port = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok();
    is_host && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
}

/// Host name or address, with an optional port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpHost(String);

impl FromToml for HttpHost {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |host| match is_host_and_port(host) {
            true => Ok(Self(host.to_owned())),
            false => Err(format!("host {host:?}: expected {}", Self::describe_valid_values())),
        })
    }

    fn describe_valid_values() -> String {
        "a host, perhaps with a port, as \"www.example.org\" or \"[2001:db8::1]:8443\"".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?$" })
    }
}

/// Certificates of certificate authorities, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateAuthorities(String);

impl FromToml for CertificateAuthorities {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        parse_toml_string(value, reader, |pem| {
            let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
            let problem = match certificates {
                Ok(certificates) if !certificates.is_empty() => return Ok(Self(pem.to_owned())),
                Ok(_) => "no certificate in it".to_owned(),
                Err(error) => error.to_string(),
            };
            Err(format!("{problem}: expected {}", Self::describe_valid_values()))
        })
    }

    fn describe_valid_values() -> String {
        "one or more certificates (\"-----BEGIN CERTIFICATE-----\" ...)".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string", "pattern": "-----BEGIN CERTIFICATE-----" })
    }
}

/// Returns the health check that the table describes, or `None` for no check. Contradictions are stored in the reader.
/// `has_mixed_address_families` is true if a server's address and the VIP are of different families.
pub fn parse_health_check(
    table: &Spanned<HealthCheckTable>,
    protocol: TransportProtocol,
    mode: ServiceSettings,
    has_mixed_address_families: bool,
    reader: &mut TomlReader<'_>,
) -> Option<HealthCheck> {
    let health = table.get_ref();
    reject_unused_keys(health, reader);
    let parsed_probe_address =
        determine_probe_address(health, vip_check_obstacle(mode, has_mixed_address_families), reader);
    if protocol == TransportProtocol::Udp && health.check.opens_connections() && health.port.is_none() {
        let message = format!(
            "check {:?} of a UDP service: expected `port`, a TCP port that answers for it, or `check = \"agent\"`",
            health.check.name()
        );
        reader.report_mistake(table.span(), message);
    }
    let probe = match health.check {
        HealthCheckKind::None => return None,
        HealthCheckKind::Tcp => HealthProbe::Tcp,
        HealthCheckKind::Agent => HealthProbe::Agent,
        HealthCheckKind::Http => HealthProbe::Http(to_http_probe(health)),
        HealthCheckKind::Https => {
            HealthProbe::Https(to_http_probe(health), parse_certificate_verification(health, reader))
        }
    };
    let to_count = |BoundedInteger(count): BoundedInteger<1, 100>| u32::try_from(count).unwrap_or(u32::MAX);
    Some(HealthCheck {
        probe,
        probe_address: parsed_probe_address,
        probe_port: health.port.as_ref().and_then(|port| u16::try_from(port.get_ref().0).ok()),
        interval: health.interval.0,
        timeout: health.timeout.0,
        thresholds: HealthVerdictThresholds::new(to_count(health.rise), to_count(health.fall))?,
        jitter: health.jitter,
    })
}

fn to_http_probe(health: &HealthCheckTable) -> HttpProbe {
    HttpProbe {
        path_and_query: health.path.as_ref().map_or_else(|| "/".to_owned(), |path| path.get_ref().0.clone()),
        host: health.host.as_ref().map(|host| host.get_ref().0.clone()),
        expected_status: health
            .expect
            .as_ref()
            .map_or_else(HttpStatusRange::success_or_redirect, |expect| expect.get_ref().clone()),
    }
}

/// Returns the reason why health checks cannot be sent to the service's VIP, or `None` if they can. The reason begins
/// with the kind of service.
fn vip_check_obstacle(mode: ServiceSettings, has_mixed_address_families: bool) -> Option<String> {
    if mode.timestamps == CookieStamper::LoadBalancer {
        let stamping_reason = "`timestamps = \"lb\"`, where the load balancer would stamp its own connections";
        return Some(format!("a service with {stamping_reason}"));
    }
    if mode.forwarding.encapsulates() {
        let forwarding_name = mode.forwarding.name();
        let forwarding_reason = "where routers would send them to a load balancer";
        return Some(format!("a service with forwarding {forwarding_name:?}, {forwarding_reason}"));
    }
    has_mixed_address_families.then(|| "a service with servers whose addresses are of another family".to_owned())
}

/// Returns the address at which servers are checked. The default is the VIP, unless checks at the VIP are impossible.
fn determine_probe_address(
    health: &HealthCheckTable,
    reason_against_vip: Option<String>,
    reader: &mut TomlReader<'_>,
) -> ProbeAddress {
    let default_address = if reason_against_vip.is_some() { ProbeAddress::Server } else { ProbeAddress::Vip };
    let Some(address_entry) = &health.at else { return default_address };
    if let Some(reason) = reason_against_vip.filter(|_| *address_entry.get_ref() == ProbeAddress::Vip) {
        reader.report_mistake(address_entry.span(), format!("checks at the VIP of {reason}: expected \"server\""));
    }
    *address_entry.get_ref()
}

/// Reports a mistake for each key that has no effect on this kind of check.
fn reject_unused_keys(health: &HealthCheckTable, reader: &mut TomlReader<'_>) {
    use HealthCheckKind::{Http, Https, Tcp};
    let keys_and_kinds: [(&str, Option<Span>, &[HealthCheckKind]); 7] = [
        ("at", health.at.as_ref().map(Spanned::span), &[Tcp, Http, Https]),
        ("port", health.port.as_ref().map(Spanned::span), &[Tcp, Http, Https]),
        ("path", health.path.as_ref().map(Spanned::span), &[Http, Https]),
        ("host", health.host.as_ref().map(Spanned::span), &[Http, Https]),
        ("expect", health.expect.as_ref().map(Spanned::span), &[Http, Https]),
        ("ca", health.ca.as_ref().map(Spanned::span), &[Https]),
        ("verify", health.verify.as_ref().map(Spanned::span), &[Https]),
    ];
    for (key, span, kinds) in keys_and_kinds {
        let Some(span) = span.filter(|_| !kinds.contains(&health.check)) else { continue };
        let kind_names: Vec<String> = kinds.iter().map(|kind| format!("{:?}", kind.name())).collect();
        let message = format!(
            "check {:?} has no `{key}`: expected it with `check` = {} only",
            health.check.name(),
            kind_names.join(" or ")
        );
        reader.report_mistake(span, message);
    }
}

fn parse_certificate_verification(health: &HealthCheckTable, reader: &mut TomlReader<'_>) -> CertificateVerification {
    match (&health.verify, &health.ca) {
        (Some(verify), None) if !verify.get_ref() => CertificateVerification::Off,
        (Some(verify), Some(_)) if !verify.get_ref() => {
            reader.report_mistake(verify.span(), "`verify = false` with `ca`: expected one of the two");
            CertificateVerification::Off
        }
        (_, Some(ca)) => CertificateVerification::PemAuthorities(ca.get_ref().0.clone()),
        (_, None) => CertificateVerification::System,
    }
}

#[cfg(test)]
mod tests;

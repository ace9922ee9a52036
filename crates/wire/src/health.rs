//! Health checks by load balancers, and their results.

use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::health::{
    CertificateVerification, HealthCheck, HealthCheckJitter, HealthProbe, HealthVerdict, HealthVerdictThresholds,
    HttpProbe, HttpStatusRange, ProbeAddress,
};

use crate::address::parse_server_id;
use crate::configuration::ServiceIndex;
use crate::{WireError, WireErrorContext as _, v1};

/// Results of one load balancer's health checks of all servers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthCheckResultsMessage {
    /// Results by service and server, in any order.
    pub check_results: Vec<(ServiceIndex, ServerId, ServerCheckResult)>,
}

/// Result of one load balancer's health checks of one server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerCheckResult {
    /// Verdict on the server, or `None` after too few checks.
    pub verdict: Option<HealthVerdict>,
    /// Time since the verdict changed to the current one.
    pub verdict_age: Duration,
    /// Error of the newest check. It is empty if that check passed, or if no check has ended yet.
    pub error: String,
    /// Latency of the newest answer to a check, or zero if there was no answer.
    pub latency: Duration,
    /// Number of checks that have ended.
    pub completed_check_count: u64,
    /// Number of checks that have failed.
    pub failed_check_count: u64,
}

const MAX_CHECK_ERROR_CHARS: usize = 200;

impl From<&HealthCheckResultsMessage> for v1::LoadBalancerHealth {
    fn from(message: &HealthCheckResultsMessage) -> Self {
        let mut services: Vec<v1::ServiceHealth> = Vec::new();
        for (service, server, check_result) in &message.check_results {
            let service_index = u32::from(service.get());
            if services.last().is_none_or(|last| last.service_index != service_index) {
                services.push(v1::ServiceHealth { service_index, servers: Vec::new() });
            }
            let server = v1::ServerHealth { server_id: server.get().into(), ..check_result.into() };
            services.last_mut().expect("one was pushed").servers.push(server);
        }
        Self { services }
    }
}

impl From<&ServerCheckResult> for v1::ServerHealth {
    fn from(check_result: &ServerCheckResult) -> Self {
        Self {
            server_id: 0,
            up: check_result.verdict.map(|verdict| verdict == HealthVerdict::Up),
            since_ms: check_result.verdict_age.as_millis() as u64,
            error: check_result.error.chars().take(MAX_CHECK_ERROR_CHARS).collect(),
            latency_us: u32::try_from(check_result.latency.as_micros()).unwrap_or(u32::MAX),
            checks: check_result.completed_check_count,
            failures: check_result.failed_check_count,
        }
    }
}

impl TryFrom<&v1::LoadBalancerHealth> for HealthCheckResultsMessage {
    type Error = WireError;

    fn try_from(message: &v1::LoadBalancerHealth) -> Result<Self, WireError> {
        let mut servers = Vec::new();
        for (position, service) in message.services.iter().enumerate() {
            let service_path = format!("services[{position}]");
            let index = ServiceIndex::parse("service_index", service.service_index).with_field_prefix(&service_path)?;
            for server in &service.servers {
                let id = parse_server_id("server_id", server.server_id).with_field_prefix(&service_path)?;
                servers.push((index, id, server.into()));
            }
        }
        Ok(Self { check_results: servers })
    }
}

impl From<&v1::ServerHealth> for ServerCheckResult {
    fn from(message: &v1::ServerHealth) -> Self {
        let to_verdict = |up: bool| if up { HealthVerdict::Up } else { HealthVerdict::Down };
        Self {
            verdict: message.up.map(to_verdict),
            verdict_age: Duration::from_millis(message.since_ms),
            error: message.error.chars().filter(|c| !c.is_control()).take(MAX_CHECK_ERROR_CHARS).collect(),
            latency: Duration::from_micros(message.latency_us.into()),
            completed_check_count: message.checks,
            failed_check_count: message.failures,
        }
    }
}

impl From<&HealthCheck> for v1::HealthCheck {
    fn from(check: &HealthCheck) -> Self {
        let mut message = Self {
            probe: check.probe.name().to_owned(),
            at: check.probe_address.name().to_owned(),
            port: check.probe_port.unwrap_or(0).into(),
            interval_ms: check.interval.as_millis() as u32,
            timeout_ms: check.timeout.as_millis() as u32,
            rise: check.thresholds.rise(),
            fall: check.thresholds.fall(),
            jitter: check.jitter.get(),
            ..Default::default()
        };
        if let HealthProbe::Http(http) | HealthProbe::Https(http, _) = &check.probe {
            message.path.clone_from(&http.path_and_query);
            message.host = http.host.clone().unwrap_or_default();
            let (first, last) = http.expected_status.status_bounds();
            (message.expect_first, message.expect_last) = (first.into(), last.into());
        }
        if let HealthProbe::Https(_, verification) = &check.probe {
            message.verify = *verification != CertificateVerification::Off;
            if let CertificateVerification::PemAuthorities(pem) = verification {
                message.authorities.clone_from(pem);
            }
        }
        message
    }
}

impl TryFrom<&v1::HealthCheck> for HealthCheck {
    type Error = WireError;

    fn try_from(message: &v1::HealthCheck) -> Result<Self, WireError> {
        let probe = match message.probe.as_str() {
            "tcp" => HealthProbe::Tcp,
            "http" => HealthProbe::Http(parse_http_probe(message)?),
            "https" => HealthProbe::Https(parse_http_probe(message)?, parse_certificate_verification(message)),
            other => {
                return Err(WireError::new("probe", format!("{other:?}: expected \"tcp\", \"http\" or \"https\"")));
            }
        };
        let probe_address = ProbeAddress::ALL.into_iter().find(|candidate| candidate.name() == message.at);
        let probe_address = probe_address
            .ok_or_else(|| WireError::new("at", format!("{:?}: expected \"vip\" or \"server\"", message.at)))?;
        let port = u16::try_from(message.port)
            .map_err(|_| WireError::new("port", format!("{}: expected 0 to 65535", message.port)))?;
        let (rise, fall) = (message.rise, message.fall);
        Ok(Self {
            probe,
            probe_address,
            probe_port: (port != 0).then_some(port),
            interval: parse_milliseconds("interval_ms", message.interval_ms)?,
            timeout: parse_milliseconds("timeout_ms", message.timeout_ms)?,
            thresholds: HealthVerdictThresholds::new(rise, fall).ok_or_else(|| {
                WireError::new("rise", format!("{rise}, and {fall} to fall: expected at least 1 each"))
            })?,
            jitter: HealthCheckJitter::new(message.jitter)
                .ok_or_else(|| WireError::new("jitter", format!("{}: expected 0 to 1", message.jitter)))?,
        })
    }
}

fn parse_http_probe(message: &v1::HealthCheck) -> Result<HttpProbe, WireError> {
    let status_bounds = (u16::try_from(message.expect_first).ok(), u16::try_from(message.expect_last).ok());
    let expected_status =
        status_bounds.0.zip(status_bounds.1).and_then(|(first, last)| HttpStatusRange::new(first, last));
    let invalid_status_text = || format!("{} to {}: expected status codes", message.expect_first, message.expect_last);
    Ok(HttpProbe {
        path_and_query: message.path.clone(),
        host: (!message.host.is_empty()).then(|| message.host.clone()),
        expected_status: expected_status.ok_or_else(|| WireError::new("expect_first", invalid_status_text()))?,
    })
}

fn parse_certificate_verification(message: &v1::HealthCheck) -> CertificateVerification {
    match (message.verify, message.authorities.as_str()) {
        (false, _) => CertificateVerification::Off,
        (true, "") => CertificateVerification::System,
        (true, pem) => CertificateVerification::PemAuthorities(pem.to_owned()),
    }
}

fn parse_milliseconds(field: &str, milliseconds: u32) -> Result<Duration, WireError> {
    match milliseconds {
        0 => Err(WireError::new(field, "0: expected at least 1")),
        _ => Ok(Duration::from_millis(milliseconds.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn health_check(probe: HealthProbe) -> HealthCheck {
        HealthCheck {
            probe,
            probe_address: ProbeAddress::Server,
            probe_port: Some(8080),
            interval: Duration::from_millis(500),
            timeout: Duration::from_millis(300),
            thresholds: HealthVerdictThresholds::new(2, 5).unwrap(),
            jitter: HealthCheckJitter::new(0.25).unwrap(),
        }
    }

    fn http_probe() -> HttpProbe {
        let expected_status = HttpStatusRange::new(200, 204).unwrap();
        HttpProbe {
            path_and_query: "/healthz?x=1".to_owned(),
            host: Some("www.example.org".to_owned()),
            expected_status,
        }
    }

    #[test]
    fn health_checks_round_trip() {
        let probes = [
            HealthProbe::Tcp,
            HealthProbe::Http(http_probe()),
            HealthProbe::Https(http_probe(), CertificateVerification::System),
            HealthProbe::Https(http_probe(), CertificateVerification::Off),
            HealthProbe::Https(http_probe(), CertificateVerification::PemAuthorities("pem".to_owned())),
        ];
        for probe in probes {
            let check = health_check(probe);
            assert_eq!(HealthCheck::try_from(&v1::HealthCheck::from(&check)), Ok(check));
        }
        let valid_message = v1::HealthCheck::from(&health_check(HealthProbe::Http(http_probe())));
        let parse_error = |message: v1::HealthCheck| HealthCheck::try_from(&message).unwrap_err().to_string();
        assert_eq!(
            parse_error(v1::HealthCheck { probe: "icmp".to_owned(), ..valid_message.clone() }),
            "probe: \"icmp\": expected \"tcp\", \"http\" or \"https\""
        );
        assert_eq!(
            parse_error(v1::HealthCheck { interval_ms: 0, ..valid_message.clone() }),
            "interval_ms: 0: expected at least 1"
        );
        assert_eq!(parse_error(v1::HealthCheck { jitter: 2.0, ..valid_message }), "jitter: 2: expected 0 to 1");
    }

    #[test]
    fn health_message_round_trips() {
        let sample_server_result = |index: u32, id: u64, verdict: Option<HealthVerdict>| {
            let check_result = ServerCheckResult {
                verdict,
                verdict_age: Duration::from_millis(1500),
                error: "connection refused".to_owned(),
                latency: Duration::from_micros(250),
                completed_check_count: 7,
                failed_check_count: 3,
            };
            (ServiceIndex::new(index).unwrap(), ServerId::try_from(id).unwrap(), check_result)
        };
        let servers = vec![
            sample_server_result(3, 7, Some(HealthVerdict::Up)),
            sample_server_result(3, 8, Some(HealthVerdict::Down)),
            sample_server_result(5, 7, None),
        ];
        let message = HealthCheckResultsMessage { check_results: servers };
        let encoded_message = v1::LoadBalancerHealth::from(&message);
        assert_eq!(encoded_message.services.len(), 2);
        assert_eq!(HealthCheckResultsMessage::try_from(&encoded_message), Ok(message));
    }
}

//! Failures of connections, which are logged and counted.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error};

use crate::identity::{FleetIdentity, FleetRole, IdentityName};

/// Minimum interval between two log lines with the same reason. Without it, many rejected connections could fill the
/// disk.
const CONNECTION_FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Reason why a connection was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConnectionFailureReason {
    Timeout,
    /// The peer does not use TLS 1.3.
    NotTls,
    NoCertificate,
    /// The certificate is signed by an authority that is not in the file `ca` of `[tls]`.
    UnknownAuthority,
    ExpiredCertificate,
    NotYetValidCertificate,
    /// The certificate does not contain the identity of a fleet member.
    NoIdentity,
    /// The certificate was issued for another fleet.
    OtherFleet,
    /// The listener does not accept the role in the certificate.
    WrongRole,
    /// The certificate does not contain the required name or host.
    WrongName,
    RevokedCertificate,
    /// The peer rejects the certificate of this process.
    RejectedByPeer,
    /// The peer's address has too many handshakes, or its identity has too many connections.
    TooManyConnections,
    /// The connection failed for another reason, such as an I/O error.
    OtherFailure,
}

impl ConnectionFailureReason {
    pub const ALL: [Self; 14] = [
        Self::Timeout,
        Self::NotTls,
        Self::NoCertificate,
        Self::UnknownAuthority,
        Self::ExpiredCertificate,
        Self::NotYetValidCertificate,
        Self::NoIdentity,
        Self::OtherFleet,
        Self::WrongRole,
        Self::WrongName,
        Self::RevokedCertificate,
        Self::RejectedByPeer,
        Self::TooManyConnections,
        Self::OtherFailure,
    ];

    /// Returns the value of the metric label `reason` for this failure.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::NotTls => "not_tls",
            Self::NoCertificate => "no_certificate",
            Self::UnknownAuthority => "unknown_authority",
            Self::ExpiredCertificate => "expired",
            Self::NotYetValidCertificate => "not_yet_valid",
            Self::NoIdentity => "no_identity",
            Self::OtherFleet => "other_fleet",
            Self::WrongRole => "wrong_role",
            Self::WrongName => "wrong_name",
            Self::RevokedCertificate => "revoked",
            Self::RejectedByPeer => "rejected_by_peer",
            Self::TooManyConnections => "too_many",
            Self::OtherFailure => "broken",
        }
    }
}

/// Error for a valid certificate whose identity is not accepted, because of its fleet, role, name or host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RejectedIdentityError {
    #[error("its certificate has no identity of a fleet ({0}): expected one URI coreward://FLEET/ROLE/NAME")]
    NoIdentity(String),
    #[error("its certificate is for {identity} of fleet {}: expected fleet {own_fleet}", identity.fleet)]
    OtherFleet { identity: FleetIdentity, own_fleet: IdentityName },
    #[error("its certificate is for {identity}: expected {}", describe_roles(expected))]
    WrongRole { identity: FleetIdentity, expected: Vec<FleetRole> },
    #[error("its certificate is for {identity} at {}: expected one for {expected}", describe_hosts(hosts))]
    WrongHost { identity: FleetIdentity, hosts: Vec<String>, expected: String },
    #[error("the certificate of {0} is revoked")]
    Revoked(FleetIdentity),
}

fn describe_roles(roles: &[FleetRole]) -> String {
    roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ")
}

fn describe_hosts(hosts: &[String]) -> String {
    if hosts.is_empty() { "no host that it names".to_owned() } else { hosts.join(", ") }
}

impl RejectedIdentityError {
    fn failure_reason(&self) -> ConnectionFailureReason {
        match self {
            Self::NoIdentity(_) => ConnectionFailureReason::NoIdentity,
            Self::OtherFleet { .. } => ConnectionFailureReason::OtherFleet,
            Self::WrongRole { .. } => ConnectionFailureReason::WrongRole,
            Self::WrongHost { .. } => ConnectionFailureReason::WrongName,
            Self::Revoked(_) => ConnectionFailureReason::RevokedCertificate,
        }
    }
}

/// Failure of a connection, with its reason and a description.
#[derive(Debug, Clone)]
pub struct PeerConnectionFailure {
    pub reason: ConnectionFailureReason,
    /// Description of the failure for the operator.
    pub failure_description: String,
}

impl fmt::Display for PeerConnectionFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.failure_description)
    }
}

impl std::error::Error for PeerConnectionFailure {}

impl PeerConnectionFailure {
    pub fn from_io_error(error: &std::io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(error) => Self::from_tls(error),
            None => Self { reason: ConnectionFailureReason::OtherFailure, failure_description: error.to_string() },
        }
    }

    fn from_tls(error: &Error) -> Self {
        use CertificateError as Wrong;
        let (reason, failure_description) = match error {
            Error::InvalidCertificate(Wrong::Other(other)) => match other.0.downcast_ref::<RejectedIdentityError>() {
                Some(accept_error) => (accept_error.failure_reason(), accept_error.to_string()),
                None => (ConnectionFailureReason::OtherFailure, error.to_string()),
            },
            Error::InvalidCertificate(Wrong::ExpiredContext { time, not_after }) => (
                ConnectionFailureReason::ExpiredCertificate,
                format!("its certificate has expired: {}", describe_validity_and_clock("until", *not_after, *time)),
            ),
            Error::InvalidCertificate(Wrong::NotValidYetContext { time, not_before }) => (
                ConnectionFailureReason::NotYetValidCertificate,
                format!(
                    "its certificate is not valid yet: {}",
                    describe_validity_and_clock("from", *not_before, *time)
                ),
            ),
            Error::InvalidCertificate(Wrong::UnknownIssuer | Wrong::BadSignature) => (
                ConnectionFailureReason::UnknownAuthority,
                "its certificate is signed by no authority in `ca`".to_owned(),
            ),
            Error::InvalidCertificate(Wrong::NotValidForName | Wrong::NotValidForNameContext { .. }) => {
                (ConnectionFailureReason::WrongName, error.to_string())
            }
            Error::InvalidCertificate(other) => {
                (ConnectionFailureReason::UnknownAuthority, format!("its certificate is wrong: {other:?}"))
            }
            Error::NoCertificatesPresented => {
                (ConnectionFailureReason::NoCertificate, "it shows no certificate".to_owned())
            }
            Error::AlertReceived(AlertDescription::CertificateRequired) => (
                ConnectionFailureReason::RejectedByPeer,
                "the peer requires a certificate: expected `[tls]` with one".to_owned(),
            ),
            Error::AlertReceived(alert) => (ConnectionFailureReason::RejectedByPeer, describe_alert(*alert)),
            Error::InvalidMessage(_) | Error::PeerIncompatible(_) | Error::InappropriateMessage { .. } => {
                (ConnectionFailureReason::NotTls, format!("the peer does not speak TLS 1.3 ({error})"))
            }
            _ => (ConnectionFailureReason::OtherFailure, error.to_string()),
        };
        Self { reason, failure_description }
    }
}

fn describe_validity_and_clock(before_or_after: &str, validity_bound: UnixTime, now: UnixTime) -> String {
    let format_date =
        |time: UnixTime| humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(time.as_secs()));
    format!(
        "valid {before_or_after} {}, and this machine's clock is at {} (timedatectl)",
        format_date(validity_bound),
        format_date(now)
    )
}

/// Returns a text that explains a TLS alert from the peer to the operator.
fn describe_alert(alert: AlertDescription) -> String {
    let cause = match alert {
        // Peers also send this alert for certificates that are not valid yet (RFC 8446).
        AlertDescription::CertificateExpired => {
            return "the peer rejects our certificate: by the peer's clock it has expired or is not valid yet; compare \
                    the clocks (timedatectl) and its dates (coreward certs show)"
                .to_owned();
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => "its signer is not in the peer's `ca`",
        AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
            "wrong fleet, role or name, or revoked; the peer's log has the reason"
        }
        _ => return format!("the peer ended the handshake with the alert {alert:?}"),
    };
    format!("the peer rejects our certificate: {cause} ({alert:?})")
}

/// Counters of connection failures, one for each reason. They also limit how often each reason is logged.
#[derive(Debug, Default)]
pub struct ConnectionFailureCounters(Mutex<BTreeMap<ConnectionFailureReason, ConnectionFailureCounter>>);

#[derive(Debug, Default)]
struct ConnectionFailureCounter {
    failure_count: u64,
    suppressed_log_count: u64,
    last_log_time: Option<Instant>,
}

impl ConnectionFailureCounters {
    fn lock_counters(&self) -> MutexGuard<'_, BTreeMap<ConnectionFailureReason, ConnectionFailureCounter>> {
        self.0.lock()
    }

    /// Counts a failure, and logs it unless a failure with the same reason was logged within the last second.
    pub fn count_and_log(&self, peer: &dyn fmt::Display, failure: &PeerConnectionFailure) {
        let mut counters = self.lock_counters();
        let counter = counters.entry(failure.reason).or_default();
        counter.failure_count += 1;
        if counter.last_log_time.is_some_and(|log_time| log_time.elapsed() < CONNECTION_FAILURE_LOG_INTERVAL) {
            counter.suppressed_log_count += 1;
            return;
        }
        let unlogged_count = std::mem::take(&mut counter.suppressed_log_count);
        counter.last_log_time = Some(Instant::now());
        drop(counters);
        let reason = failure.reason.name();
        tracing::warn!(
            event = "connection-rejected",
            %peer,
            reason,
            error = %failure,
            not_logged = unlogged_count,
            "the daemon rejects a TLS connection; `not_logged` earlier rejections for this reason were not logged"
        );
    }

    pub fn failure_counts_by_reason(&self) -> Vec<(ConnectionFailureReason, u64)> {
        let counters = self.lock_counters();
        ConnectionFailureReason::ALL
            .into_iter()
            .map(|reason| (reason, counters.get(&reason).map_or(0, |counter| counter.failure_count)))
            .collect()
    }
}

//! Failures of connections, which are logged and counted.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant, UNIX_EPOCH};

use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error};

use crate::identity::{Identity, Name, Role};

/// Minimum interval between two log lines with the same reason, so that many rejected connections do not fill the disk.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Reason why a connection was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FailureReason {
    Timeout,
    /// The peer does not use TLS 1.3.
    NotTls,
    NoCertificate,
    /// The certificate is signed by an authority that is not in `ca`.
    UnknownAuthority,
    Expired,
    NotYetValid,
    /// The certificate does not contain the identity of a fleet member.
    NoIdentity,
    /// The certificate was issued for another fleet.
    OtherFleet,
    /// The listener does not accept the role in the certificate.
    WrongRole,
    /// The certificate does not contain the required name or host.
    WrongName,
    Revoked,
    /// The peer rejects the certificate of this process.
    RejectedByPeer,
    /// The peer's address has too many handshakes, or its identity has too many connections.
    TooManyConnections,
    /// The connection failed for another reason, such as an I/O error.
    Broken,
}

impl FailureReason {
    pub const ALL: [Self; 14] = [
        Self::Timeout,
        Self::NotTls,
        Self::NoCertificate,
        Self::UnknownAuthority,
        Self::Expired,
        Self::NotYetValid,
        Self::NoIdentity,
        Self::OtherFleet,
        Self::WrongRole,
        Self::WrongName,
        Self::Revoked,
        Self::RejectedByPeer,
        Self::TooManyConnections,
        Self::Broken,
    ];

    /// Returns the value of the metric label `reason` for this failure.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::NotTls => "not_tls",
            Self::NoCertificate => "no_certificate",
            Self::UnknownAuthority => "unknown_authority",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::NoIdentity => "no_identity",
            Self::OtherFleet => "other_fleet",
            Self::WrongRole => "wrong_role",
            Self::WrongName => "wrong_name",
            Self::Revoked => "revoked",
            Self::RejectedByPeer => "rejected_by_peer",
            Self::TooManyConnections => "too_many",
            Self::Broken => "broken",
        }
    }
}

/// Error for a valid certificate whose identity is not accepted, because of its fleet, role, name or host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    #[error("its certificate has no identity of a fleet ({0}): expected one URI coreward://FLEET/ROLE/NAME")]
    NoIdentity(String),
    #[error("its certificate is for {identity} of fleet {}: expected fleet {own_fleet}", identity.fleet)]
    OtherFleet { identity: Identity, own_fleet: Name },
    #[error("its certificate is for {identity}: expected {}", roles(expected))]
    WrongRole { identity: Identity, expected: Vec<Role> },
    #[error("its certificate is for {identity} at {}: expected one for {expected}", describe_hosts(hosts))]
    WrongHost { identity: Identity, hosts: Vec<String>, expected: String },
    #[error("the certificate of {0} is revoked")]
    Revoked(Identity),
}

fn roles(describe_roles: &[Role]) -> String {
    describe_roles.iter().map(|role| role.name()).collect::<Vec<_>>().join(" or ")
}

fn describe_hosts(hosts: &[String]) -> String {
    if hosts.is_empty() { "no host that it names".to_owned() } else { hosts.join(", ") }
}

impl AcceptError {
    fn reason(&self) -> FailureReason {
        match self {
            Self::NoIdentity(_) => FailureReason::NoIdentity,
            Self::OtherFleet { .. } => FailureReason::OtherFleet,
            Self::WrongRole { .. } => FailureReason::WrongRole,
            Self::WrongHost { .. } => FailureReason::WrongName,
            Self::Revoked(_) => FailureReason::Revoked,
        }
    }
}

/// Failure of a connection, with its reason and a description.
#[derive(Debug, Clone)]
pub struct Failure {
    pub reason: FailureReason,
    /// Description of the failure for the operator.
    pub message: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl Failure {
    pub fn of(error: &std::io::Error) -> Self {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(error) => Self::from_tls(error),
            None => Self { reason: FailureReason::Broken, message: error.to_string() },
        }
    }

    fn from_tls(error: &Error) -> Self {
        use CertificateError as Wrong;
        let (reason, message) = match error {
            Error::InvalidCertificate(Wrong::Other(other)) => match other.0.downcast_ref::<AcceptError>() {
                Some(accept_error) => (accept_error.reason(), accept_error.to_string()),
                None => (FailureReason::Broken, error.to_string()),
            },
            Error::InvalidCertificate(Wrong::ExpiredContext { time, not_after }) => (
                FailureReason::Expired,
                format!("its certificate has expired: {}", describe_clocks("until", *not_after, *time)),
            ),
            Error::InvalidCertificate(Wrong::NotValidYetContext { time, not_before }) => (
                FailureReason::NotYetValid,
                format!("its certificate is not valid yet: {}", describe_clocks("from", *not_before, *time)),
            ),
            Error::InvalidCertificate(Wrong::UnknownIssuer | Wrong::BadSignature) => {
                (FailureReason::UnknownAuthority, "its certificate is signed by no authority in `ca`".to_owned())
            }
            Error::InvalidCertificate(Wrong::NotValidForName | Wrong::NotValidForNameContext { .. }) => {
                (FailureReason::WrongName, error.to_string())
            }
            Error::InvalidCertificate(other) => {
                (FailureReason::UnknownAuthority, format!("its certificate is wrong: {other:?}"))
            }
            Error::NoCertificatesPresented => (FailureReason::NoCertificate, "it shows no certificate".to_owned()),
            Error::AlertReceived(AlertDescription::CertificateRequired) => {
                (FailureReason::RejectedByPeer, "the peer requires a certificate: expected `[tls]` with one".to_owned())
            }
            Error::AlertReceived(alert) => (FailureReason::RejectedByPeer, describe_alert(*alert)),
            Error::InvalidMessage(_) | Error::PeerIncompatible(_) | Error::InappropriateMessage { .. } => {
                (FailureReason::NotTls, format!("the peer does not speak TLS 1.3 ({error})"))
            }
            _ => (FailureReason::Broken, error.to_string()),
        };
        Self { reason, message }
    }
}

fn describe_clocks(before_or_after: &str, validity_bound: UnixTime, now: UnixTime) -> String {
    let format_date =
        |time: UnixTime| humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(time.as_secs()));
    format!(
        "valid {before_or_after} {}, and this machine's clock is at {} (timedatectl)",
        format_date(validity_bound),
        format_date(now)
    )
}

/// Returns a description for the operator of a TLS alert that the peer has sent.
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
pub struct FailureCounters(Mutex<BTreeMap<FailureReason, FailureCounter>>);

#[derive(Debug, Default)]
struct FailureCounter {
    count: u64,
    suppressed_count: u64,
    last_log_time: Option<Instant>,
}

impl FailureCounters {
    fn lock_counters(&self) -> MutexGuard<'_, BTreeMap<FailureReason, FailureCounter>> {
        self.0.lock()
    }

    /// Counts a failure, and logs it unless a failure with the same reason was logged within the last second.
    pub fn count_and_log(&self, peer: &dyn fmt::Display, failure: &Failure) {
        let mut counters = self.lock_counters();
        let counter = counters.entry(failure.reason).or_default();
        counter.count += 1;
        if counter.last_log_time.is_some_and(|log_time| log_time.elapsed() < LOG_INTERVAL) {
            counter.suppressed_count += 1;
            return;
        }
        let unlogged_count = std::mem::take(&mut counter.suppressed_count);
        counter.last_log_time = Some(Instant::now());
        drop(counters);
        let reason = failure.reason.name();
        tracing::warn!(
            event = "connection-rejected",
            %peer,
            reason,
            error = %failure,
            not_logged = unlogged_count,
            "the daemon rejects a TLS connection; before it, `not_logged` rejections for this reason were not logged"
        );
    }

    pub fn counts_by_reason(&self) -> Vec<(FailureReason, u64)> {
        let counters = self.lock_counters();
        FailureReason::ALL
            .into_iter()
            .map(|reason| (reason, counters.get(&reason).map_or(0, |counter| counter.count)))
            .collect()
    }
}

//! Facts about the daemon's certificates.

use coreward_tls::certificate::unix_now;
use coreward_tls::{FleetRole as CertifiedRole, TlsCredentialFiles, table};

use crate::facts::{CertificateFacts, MachineRole};

/// Returns facts about the daemon's certificates, which should contain this machine's name in the fleet. Fails if the
/// certificate files are unusable, so that the daemon could not start.
pub(super) fn gather_certificates(
    role: MachineRole,
    files: Option<&TlsCredentialFiles>,
    machine_name: Option<&str>,
) -> anyhow::Result<Vec<CertificateFacts>> {
    let Some(tls) = table::load_tls_credentials(files)? else { return Ok(Vec::new()) };
    let certified_role = match role {
        MachineRole::Lb => CertifiedRole::Lb,
        MachineRole::Server => CertifiedRole::Agent,
        MachineRole::Controller => CertifiedRole::Controller,
    };
    let identity = tls.identity();
    let is_own_identity =
        identity.role == certified_role && machine_name.is_none_or(|name| name == identity.name.as_str());
    let expected_identity =
        machine_name.map_or_else(|| certified_role.to_string(), |name| format!("{certified_role} {name}"));
    let now = unix_now();
    let certificates = tls.labelled_certificates().into_iter().map(|(usage, certificate)| CertificateFacts {
        usage,
        remaining_validity: certificate.remaining_validity(now),
        is_renewal_due: certificate.is_renewal_due(now),
        identity_mismatch: (usage == "own" && !is_own_identity)
            .then(|| format!("{identity}: expected {expected_identity}")),
        subject: certificate.identity.as_ref().map_or(certificate.subject.clone(), ToString::to_string),
    });
    Ok(certificates.collect())
}

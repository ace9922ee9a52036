//! Check of the daemon's certificates.

use coreward_tls::authority::DAY;

use crate::facts::{CertificateFacts, MachineFacts};
use crate::finding::Finding;

pub fn check_certificates(facts: &MachineFacts) -> Vec<Finding> {
    facts.certificates.iter().map(check_certificate).collect()
}

fn check_certificate(certificate: &CertificateFacts) -> Finding {
    let CertificateFacts { usage, subject, identity_mismatch: wrong_owner, remaining_validity, is_renewal_due } =
        certificate;
    let renewal_command = match *usage {
        "own" => {
            "coreward certs renew DIRECTORY  # where the authority's key is; then copy own.crt, own.key and ca.crt here"
        }
        _ => "coreward certs roll-over begin  # where the authority's key is; docs/security.md has the next steps",
    };
    if let Some(owner) = wrong_owner {
        let consequence = "peers use the name of the certificate, and reject messages in another name";
        return Finding::fault(format!("the certificate is for {owner}"), consequence)
            .with_remedy_step("coreward certs issue --role ROLE --name NAME  # where the authority's key is");
    }
    if remaining_validity.is_zero() {
        let consequence = "connections to peers fail, and open ones have ended; packets follow the last table";
        return Finding::fault(format!("{subject} has ended"), consequence).with_remedy_step(renewal_command);
    }
    let days_left = remaining_validity.as_secs() / DAY.as_secs();
    match is_renewal_due {
        true => Finding::warning(format!("{subject} ends in {days_left} days"), "connections end with it")
            .with_remedy_step(renewal_command),
        false => Finding::ok(format!("{subject} is valid for {days_left} days")),
    }
}

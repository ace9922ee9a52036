//! Check of certificates.

use coreward_tls::authority::DAY;

use crate::facts::{CertificateFacts, Facts};
use crate::finding::Finding;

pub fn certificates(facts: &Facts) -> Vec<Finding> {
    facts.certificates.iter().map(check_certificate).collect()
}

fn check_certificate(certificate: &CertificateFacts) -> Finding {
    let CertificateFacts { usage: which, subject, wrong_owner, remaining_validity: remains, is_renewal_due } =
        certificate;
    let renew = match *which {
        "own" => {
            "coreward certs renew DIRECTORY  # where the authority's key is; then copy own.crt, own.key and ca.crt here"
        }
        _ => "coreward certs roll-over begin  # where the authority's key is; docs/security.md has the next steps",
    };
    if let Some(wrong) = wrong_owner {
        let why = "peers use the name of the certificate, and reject messages in another name";
        return Finding::fault(format!("the certificate is for {wrong}"), why)
            .with_remediation("coreward certs issue --role ROLE --name NAME  # where the authority's key is");
    }
    if remains.is_zero() {
        let why = "connections to peers fail, and open ones have ended; packets follow the last table";
        return Finding::fault(format!("{subject} has ended"), why).with_remediation(renew);
    }
    let days = remains.as_secs() / DAY.as_secs();
    match is_renewal_due {
        true => Finding::warning(format!("{subject} ends in {days} days"), "connections end with it")
            .with_remediation(renew),
        false => Finding::ok(format!("{subject} is valid for {days} days")),
    }
}

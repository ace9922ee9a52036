//! Credentials of a process, which are read again when their files change.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::certificate::{Certificate, unix_now};
use crate::credentials::{CredentialError, Credentials, TlsCredentialFiles};
use crate::file_watcher::FileWatcher;
use crate::identity::FleetIdentity;

/// Interval between repeated log lines about a certificate that expires soon.
const CERTIFICATE_EXPIRY_REMINDER_INTERVAL: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
pub struct ReloadableTlsCredentials {
    credential_files: TlsCredentialFiles,
    credentials_sender: watch::Sender<Arc<Credentials>>,
    file_watcher: FileWatcher,
}

impl ReloadableTlsCredentials {
    pub fn load_from_files(files: TlsCredentialFiles) -> Result<Arc<Self>, CredentialError> {
        let file_watcher = FileWatcher::from_paths([&files.ca_path, &files.certificate_path, &files.key_path]);
        let credentials = Arc::new(Credentials::load(&files)?);
        tracing::info!(
            event = "certificate-loaded",
            file = %files.certificate_path.display(),
            identity = %credentials.identity,
            validity = %format_remaining_validity(&credentials.own_certificate),
            "the daemon has loaded its certificate"
        );
        Ok(Arc::new(Self {
            credential_files: files,
            credentials_sender: watch::Sender::new(credentials),
            file_watcher,
        }))
    }

    pub(crate) fn credentials(&self) -> Arc<Credentials> {
        self.credentials_sender.borrow().clone()
    }

    pub fn identity(&self) -> FleetIdentity {
        self.credentials().identity.clone()
    }

    /// Returns the own certificate and the authorities' certificates, each with the metric label value that identifies
    /// it.
    pub fn labelled_certificates(&self) -> Vec<(&'static str, Certificate)> {
        let credentials = self.credentials();
        let authorities = credentials.authorities.iter().map(|authority| ("ca", authority.clone()));
        std::iter::once(("own", credentials.own_certificate.clone())).chain(authorities).collect()
    }

    /// Returns a warning for the operator about each certificate that expires soon.
    pub fn expiry_warnings(&self) -> Vec<String> {
        let now = unix_now();
        let expiring_certificates =
            self.labelled_certificates().into_iter().filter(|(_, certificate)| certificate.is_renewal_due(now));
        expiring_certificates
            .map(|(usage, certificate)| match usage {
                "own" => {
                    format!(
                        "our certificate ends in {}: `coreward certs renew`",
                        format_remaining_validity(&certificate)
                    )
                }
                _ => format!(
                    "the authority {} of `ca` ends in {}: roll over to a new one",
                    certificate.subject,
                    format_remaining_validity(&certificate)
                ),
            })
            .collect()
    }

    /// Reads the files again. Fails and keeps the old credentials if a file is unusable or the identity has changed.
    pub fn reload_credentials(&self) -> Result<(), CredentialError> {
        self.file_watcher.record_modification_times();
        let new_credentials = Credentials::load(&self.credential_files)?;
        let old_credentials = self.credentials();
        if new_credentials.identity != old_credentials.identity {
            let message = format!(
                "{}: it is for {}, and this process is {}: expected a restart",
                self.credential_files.certificate_path.display(),
                new_credentials.identity,
                old_credentials.identity
            );
            return Err(CredentialError { config_key: "certificate", message });
        }
        let remaining_validity = format_remaining_validity(&new_credentials.own_certificate);
        tracing::info!(
            event = "certificates-reloaded",
            file = %self.credential_files.certificate_path.display(),
            identity = %new_credentials.identity,
            validity = %remaining_validity,
            "the daemon has reloaded its certificate and authorities"
        );
        self.credentials_sender.send_replace(Arc::new(new_credentials));
        Ok(())
    }

    /// Reloads the credentials when their files change and on SIGHUP, and logs certificates that expire soon.
    pub async fn reload_credentials_on_change(self: Arc<Self>) -> std::convert::Infallible {
        let mut sighup_stream = signal(SignalKind::hangup()).ok();
        let mut reminder_timer = tokio::time::interval(CERTIFICATE_EXPIRY_REMINDER_INTERVAL);
        loop {
            let wait_for_sighup = async {
                match &mut sighup_stream {
                    Some(hangup) => hangup.recv().await,
                    None => std::future::pending().await,
                }
            };
            let is_reload_due = tokio::select! {
                _ = wait_for_sighup => true,
                () = self.file_watcher.wait_for_change() => true,
                _ = reminder_timer.tick() => {
                    for problem in self.expiry_warnings() {
                        tracing::warn!(
                            event = "certificate-ends",
                            identity = %self.identity(),
                            %problem,
                            "a certificate of this daemon expires soon"
                        );
                    }
                    false
                }
            };
            if is_reload_due && let Err(error) = self.reload_credentials() {
                tracing::warn!(
                    event = "certificates-not-reloaded",
                    file = %self.credential_files.certificate_path.display(),
                    %error,
                    "the daemon cannot use the changed certificate files and keeps the previous certificates"
                );
            }
        }
    }
}

/// Returns the remaining validity of a certificate as text, in days or a smaller unit.
fn format_remaining_validity(certificate: &Certificate) -> String {
    let remaining_validity = certificate.remaining_validity(unix_now());
    let rounded_seconds = match remaining_validity.as_secs() {
        0 => return "0s (it has expired)".to_owned(),
        seconds @ 0..3600 => seconds,
        seconds @ 3600..172_800 => seconds - seconds % 60,
        seconds => seconds - seconds % 86_400,
    };
    humantime::format_duration(Duration::from_secs(rounded_seconds)).to_string()
}

//! Sessions of browsers. A browser sends its session cookie to any listener on the host, and with requests from any
//! page of the same site. So every session has only the viewer's role, even if an operator began it, and cannot change
//! the fleet.

use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use coreward_tls::certificate::CertificateFingerprint;
use coreward_tls::verify::RevocationList;
use parking_lot::{Mutex, MutexGuard};
use rand::rand_core::{TryRng as _, UnwrapErr};
use rand::rngs::SysRng;
use subtle::ConstantTimeEq as _;

const API_SESSION_LIFETIME: Duration = Duration::from_secs(12 * 3600);
/// Maximum number of sessions. At the limit, a new session ends the oldest one.
const MAX_API_SESSIONS: usize = 256;
const SESSION_COOKIE_NAME: &str = "coreward_session";

/// Current sessions of browsers.
#[derive(Default)]
pub struct BrowserSessions(Mutex<Vec<BrowserSession>>);

/// Kind of credential with which a session began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionCredentialKind {
    /// Session that began with the token of a role.
    Token,
    /// Session that began with a client certificate.
    Certificate {
        /// Fingerprint of the certificate. The session ends when this certificate is revoked.
        fingerprint: CertificateFingerprint,
        /// End of the certificate's validity, as time since 1970.
        not_after: Duration,
    },
}

impl SessionCredentialKind {
    fn is_valid(&self, revocation_list: &RevocationList) -> bool {
        match self {
            Self::Token => true,
            Self::Certificate { fingerprint, not_after } => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                now < *not_after && !revocation_list.contains(fingerprint)
            }
        }
    }
}

struct BrowserSession {
    id: String,
    credential: SessionCredentialKind,
    expires_at: Instant,
}

impl BrowserSessions {
    /// Begins a session and returns its `Set-Cookie` value. The cookie is `Secure` if the request arrived over TLS.
    pub fn begin_session(&self, credential: SessionCredentialKind, is_encrypted: bool) -> String {
        let mut random_bytes = [0; 32];
        let Ok(()) = UnwrapErr(SysRng).try_fill_bytes(&mut random_bytes);
        let id = URL_SAFE_NO_PAD.encode(random_bytes);
        let mut sessions = self.lock_live_sessions();
        if sessions.len() >= MAX_API_SESSIONS {
            sessions.remove(0);
        }
        let cookie = cookie_header_value(&id, API_SESSION_LIFETIME, is_encrypted);
        sessions.push(BrowserSession { id, credential, expires_at: Instant::now() + API_SESSION_LIFETIME });
        cookie
    }

    /// Returns whether the request's cookie belongs to a valid session. A session that began with a certificate is no
    /// longer valid when the certificate expires or is revoked.
    pub fn has_valid_session(&self, headers: &HeaderMap, revocation_list: &RevocationList) -> bool {
        let mut live_sessions = self.lock_live_sessions();
        live_sessions.retain(|session| session.credential.is_valid(revocation_list));
        parse_session_ids(headers).any(|id| live_sessions.iter().any(|session| session.matches_session_id(id)))
    }

    /// Ends the request's session, and returns the `Set-Cookie` value that deletes the cookie. This value is `Secure`
    /// if the request arrived over TLS.
    pub fn end_session(&self, headers: &HeaderMap, is_encrypted: bool) -> String {
        for id in parse_session_ids(headers) {
            self.lock_live_sessions().retain(|session| !session.matches_session_id(id));
        }
        cookie_header_value("", Duration::ZERO, is_encrypted)
    }

    /// Ends all sessions that began with a token.
    pub fn end_token_sessions(&self) {
        self.lock_live_sessions().retain(|session| session.credential != SessionCredentialKind::Token);
    }

    /// Ends all sessions that began with a certificate.
    pub fn end_certificate_sessions(&self) {
        self.lock_live_sessions().retain(|session| session.credential == SessionCredentialKind::Token);
    }

    fn lock_live_sessions(&self) -> MutexGuard<'_, Vec<BrowserSession>> {
        let mut sessions = self.0.lock();
        let now = Instant::now();
        sessions.retain(|session| session.expires_at > now);
        sessions
    }
}

impl BrowserSession {
    fn matches_session_id(&self, id: &str) -> bool {
        self.id.as_bytes().ct_eq(id.as_bytes()).into()
    }
}

/// Returns the value of a `Set-Cookie` header. The cookie has the attribute `Secure` only with TLS, because browsers
/// ignore a `Secure` cookie that arrives unencrypted (RFC 6265bis, Sect. 4.1.2.5).
fn cookie_header_value(id: &str, max_age: Duration, is_encrypted: bool) -> String {
    let secure_attribute = if is_encrypted { "; Secure" } else { "" };
    format!(
        "{SESSION_COOKIE_NAME}={id}; Path=/; HttpOnly; SameSite=Strict; Max-Age={}{secure_attribute}",
        max_age.as_secs()
    )
}

fn parse_session_ids(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let cookie_headers = headers.get_all(header::COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
    cookie_headers
        .flat_map(|cookies| cookies.split(';'))
        .filter_map(|cookie_pair| cookie_pair.trim().split_once('='))
        .filter_map(|(name, value)| (name == SESSION_COOKIE_NAME).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers_with_cookie(cookie: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::COOKIE, format!("other=1; {cookie}").parse().unwrap());
        headers
    }

    #[test]
    fn session_lasts_until_logout() {
        let (sessions, revoked) = (BrowserSessions::default(), RevocationList::default());
        let cookie = sessions.begin_session(SessionCredentialKind::Token, false);
        assert!(cookie.contains("HttpOnly; SameSite=Strict") && !cookie.contains("Secure"), "{cookie}");
        let headers = headers_with_cookie(cookie.split(';').next().unwrap());
        assert!(
            sessions.has_valid_session(&headers, &revoked)
                && !sessions.has_valid_session(&headers_with_cookie("coreward_session="), &revoked)
                && !sessions.has_valid_session(&headers_with_cookie("a=b"), &revoked)
        );
        assert!(sessions.end_session(&headers, false).contains("Max-Age=0"));
        assert!(!sessions.has_valid_session(&headers, &revoked));
        let begin_session =
            |credential| headers_with_cookie(sessions.begin_session(credential, false).split(';').next().unwrap());
        let certificate_credential = |n: u8, not_after| SessionCredentialKind::Certificate {
            fingerprint: CertificateFingerprint::sha256(&[n]),
            not_after,
        };
        let [token, lost, kept, expired] = [
            SessionCredentialKind::Token,
            certificate_credential(1, Duration::MAX),
            certificate_credential(2, Duration::MAX),
            certificate_credential(3, Duration::from_secs(1)),
        ]
        .map(begin_session);
        assert!(sessions.has_valid_session(&lost, &revoked) && !sessions.has_valid_session(&expired, &revoked));
        revoked.replace_fingerprints([CertificateFingerprint::sha256(&[1])]);
        assert!(!sessions.has_valid_session(&lost, &revoked) && sessions.has_valid_session(&kept, &revoked));
        sessions.end_certificate_sessions();
        assert!(sessions.has_valid_session(&token, &revoked) && !sessions.has_valid_session(&kept, &revoked));
        sessions.end_token_sessions();
        assert!(!sessions.has_valid_session(&token, &revoked));
    }

    #[test]
    fn oldest_session_is_evicted_at_limit() {
        let sessions = BrowserSessions::default();
        let first_session_headers =
            headers_with_cookie(sessions.begin_session(SessionCredentialKind::Token, false).split(';').next().unwrap());
        (0..MAX_API_SESSIONS).for_each(|_| drop(sessions.begin_session(SessionCredentialKind::Token, false)));
        assert!(!sessions.has_valid_session(&first_session_headers, &RevocationList::default()));
        assert_eq!(sessions.lock_live_sessions().len(), MAX_API_SESSIONS);
    }
}

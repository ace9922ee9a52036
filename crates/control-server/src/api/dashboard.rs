//! The dashboard, which is one page without external content, and the browser's session.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use coreward_http::serve::{CertificateIdentity, ConnectionPeer};
use coreward_http::sessions::SessionCredentialKind;
use coreward_http::{Problem, ProblemKind};

use super::ApiState;

/// Content security policy that allows only content from the controller itself, and no frames.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
    img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns the routes of the dashboard's page and files. They contain no fleet data and therefore need no token.
pub fn dashboard_routes() -> axum::Router<ApiState> {
    let serve_static_file = |content_type: &'static str, text: &'static str| {
        get(async move || {
            let response_headers = [
                (header::CONTENT_TYPE, content_type),
                (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
                (header::REFERRER_POLICY, "no-referrer"),
            ];
            (response_headers, text)
        })
    };
    axum::Router::new()
        .route("/", serve_static_file("text/html; charset=utf-8", include_str!("dashboard/index.html")))
        .route("/dashboard.css", serve_static_file("text/css; charset=utf-8", include_str!("dashboard/dashboard.css")))
        .route(
            "/dashboard.js",
            serve_static_file("text/javascript; charset=utf-8", include_str!("dashboard/dashboard.js")),
        )
}

/// Begin a browser session for a caller with a token or a certificate, by a cookie with a viewer's rights
#[utoipa::path(
    post, path = "/v1/session",
    responses((status = 204, description = "The session's cookie (`Set-Cookie`)"))
)]
pub async fn log_in(
    State(api): State<ApiState>,
    Extension(peer): Extension<ConnectionPeer>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Problem> {
    // Callers with a token or a certificate may begin a session. A session cannot renew itself, or it would never end.
    let session_credential = if headers.contains_key(header::AUTHORIZATION) {
        SessionCredentialKind::Token
    } else if let Some(CertificateIdentity { fingerprint, not_after, .. }) = peer.certificate {
        SessionCredentialKind::Certificate { fingerprint, not_after }
    } else {
        let error_detail =
            "a session cannot begin another one: expected a token, or an operator's or viewer's certificate";
        return Err(Problem::new(ProblemKind::Forbidden, error_detail));
    };
    Ok((
        StatusCode::NO_CONTENT,
        [(
            header::SET_COOKIE,
            api.access_control.sessions().begin_session(session_credential, peer.is_connection_encrypted),
        )],
    ))
}

/// End the browser session
#[utoipa::path(
    delete, path = "/v1/session",
    responses((status = 204, description = "The session has ended; `Set-Cookie` removes the cookie"))
)]
pub async fn log_out(
    State(api): State<ApiState>,
    Extension(peer): Extension<ConnectionPeer>,
    headers: HeaderMap,
) -> impl IntoResponse {
    (
        StatusCode::NO_CONTENT,
        [(header::SET_COOKIE, api.access_control.sessions().end_session(&headers, peer.is_connection_encrypted))],
    )
}

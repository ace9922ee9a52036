//! Error responses as in RFC 9457 (`application/problem+json`).

use axum::Json;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use coreward_api::types::DocumentMistake;
use coreward_config::Diagnostics;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Media type of a [`Problem`].
pub const PROBLEM_JSON_MEDIA_TYPE: &str = "application/problem+json";

/// Kind of an error that the API returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ProblemKind {
    /// The request is malformed.
    #[serde(rename = "urn:coreward:problem:bad-request")]
    BadRequest,
    /// The request has no valid token.
    #[serde(rename = "urn:coreward:problem:unauthenticated")]
    Unauthenticated,
    /// The caller's role does not permit the request.
    #[serde(rename = "urn:coreward:problem:forbidden")]
    Forbidden,
    /// The object that the request names does not exist.
    #[serde(rename = "urn:coreward:problem:not-found")]
    NotFound,
    /// The path does not support the request's HTTP method.
    #[serde(rename = "urn:coreward:problem:method-not-allowed")]
    MethodNotAllowed,
    /// The request took longer than the time limit.
    #[serde(rename = "urn:coreward:problem:timeout")]
    Timeout,
    /// The controller's state differs from the state that the request expects.
    #[serde(rename = "urn:coreward:problem:conflict")]
    Conflict,
    /// The request's body exceeds the endpoint's size limit.
    #[serde(rename = "urn:coreward:problem:too-large")]
    TooLarge,
    /// The request's body is not JSON.
    #[serde(rename = "urn:coreward:problem:unsupported-media-type")]
    UnsupportedMediaType,
    /// The document in the request has mistakes (see `mistakes`).
    #[serde(rename = "urn:coreward:problem:wrong-document")]
    WrongDocument,
    /// One address of the request is an IPv4 address, and the other an IPv6 address.
    #[serde(rename = "urn:coreward:problem:mixed-address-families")]
    MixedAddressFamilies,
    /// The caller's rate limit, or the limit of watchers, is exceeded. `Retry-After` contains the time until the next
    /// attempt.
    #[serde(rename = "urn:coreward:problem:too-many-requests")]
    TooManyRequests,
    /// Another controller is the leader (see `leader` and `leader_api`).
    #[serde(rename = "urn:coreward:problem:not-leading")]
    NotLeading,
    /// The change cannot be stored, for example because the disk is full. Nothing has changed.
    #[serde(rename = "urn:coreward:problem:not-stored")]
    NotStored,
    /// The controller has an internal fault.
    #[serde(rename = "urn:coreward:problem:internal")]
    Internal,
}

impl ProblemKind {
    fn status_and_title(self) -> (StatusCode, &'static str) {
        match self {
            Self::BadRequest => (StatusCode::BAD_REQUEST, "The request is malformed"),
            Self::Unauthenticated => (StatusCode::UNAUTHORIZED, "No valid token or certificate"),
            Self::Forbidden => (StatusCode::FORBIDDEN, "The role does not permit this request"),
            Self::NotFound => (StatusCode::NOT_FOUND, "Not found"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "The path does not support this method"),
            Self::Timeout => (StatusCode::REQUEST_TIMEOUT, "The request took too long"),
            Self::Conflict => (StatusCode::CONFLICT, "The present state does not permit this change"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "The body is too large"),
            Self::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "The body is not JSON"),
            Self::WrongDocument => (StatusCode::UNPROCESSABLE_ENTITY, "The document has mistakes"),
            Self::MixedAddressFamilies => (StatusCode::UNPROCESSABLE_ENTITY, "The address families differ"),
            Self::TooManyRequests => (StatusCode::TOO_MANY_REQUESTS, "Too many requests"),
            Self::NotLeading => (StatusCode::SERVICE_UNAVAILABLE, "Another controller leads"),
            Self::NotStored => (StatusCode::INSUFFICIENT_STORAGE, "The change cannot be stored"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "The controller failed"),
        }
    }
}

/// Error response of the API (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Kind of the error.
    #[serde(rename = "type")]
    pub kind: ProblemKind,
    /// Short title of the error's kind, for people.
    pub title: Box<str>,
    /// HTTP status code of the response.
    pub status: u16,
    /// Description of the error: the value found and the expected value.
    pub detail: String,
    /// Mistakes in a document, in the order of its lines (at most the first 100).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mistakes: Vec<DocumentMistake>,
    /// Time until the next attempt, in seconds, as in `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
    /// Address at which daemons reach the leading controller, if this controller is a follower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<Box<str>>,
    /// `https://HOST:PORT` of the leader's API, to repeat the request there. Absent if that API is limited to its host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uri")]
    pub leader_api: Option<Box<str>>,
}

impl Problem {
    /// Creates an error response. `detail` contains the value found and the value expected.
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        let (status, title) = kind.status_and_title();
        let (title, status) = (title.into(), status.as_u16());
        let mistakes = Vec::new();
        Self {
            kind,
            title,
            status,
            detail: detail.into(),
            mistakes,
            retry_after_s: None,
            leader: None,
            leader_api: None,
        }
    }

    /// Returns the error for an object that does not exist. `resource_kind` is the kind of the object, such as `path`.
    pub fn not_found(resource_kind: &str, name: &str) -> Self {
        Self::new(ProblemKind::NotFound, format!("{resource_kind} {name:?} does not exist"))
    }

    /// Returns the error for an internal fault of the controller.
    pub fn internal_error(error: &anyhow::Error) -> Self {
        Self::new(ProblemKind::Internal, format!("{error:#}"))
    }

    /// Sets the time after which the client may try again, in seconds.
    pub fn with_retry_after(self, seconds: u64) -> Self {
        Self { retry_after_s: Some(seconds), ..self }
    }
}

impl From<&Diagnostics> for Problem {
    fn from(mistakes: &Diagnostics) -> Self {
        let document_mistakes = mistakes.shown_diagnostics.iter().map(DocumentMistake::from).collect();
        Self { mistakes: document_mistakes, ..Self::new(ProblemKind::WrongDocument, mistakes.to_string()) }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, _) = self.kind.status_and_title();
        let retry_after = self.retry_after_s;
        let is_unauthenticated = self.kind == ProblemKind::Unauthenticated;
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON_MEDIA_TYPE));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if is_unauthenticated {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"coreward\""));
        }
        response
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(ProblemKind::BadRequest, rejection.body_text())
    }
}

impl From<PathRejection> for Problem {
    fn from(rejection: PathRejection) -> Self {
        Self::new(ProblemKind::BadRequest, rejection.body_text())
    }
}

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        let kind = match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => ProblemKind::TooLarge,
            StatusCode::UNSUPPORTED_MEDIA_TYPE => ProblemKind::UnsupportedMediaType,
            _ => ProblemKind::BadRequest,
        };
        Self::new(kind, rejection.body_text())
    }
}

impl From<BytesRejection> for Problem {
    fn from(rejection: BytesRejection) -> Self {
        JsonRejection::BytesRejection(rejection).into()
    }
}

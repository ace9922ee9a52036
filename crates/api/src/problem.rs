//! Errors as RFC 9457 has them: `application/problem+json`.

use axum::Json;
use axum::extract::rejection::{BytesRejection, JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use coreward_config::{Diagnostic, Diagnostics};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Media type of a [`Problem`].
pub const PROBLEM_JSON: &str = "application/problem+json";

/// What kind of error it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ProblemKind {
    /// The request cannot be understood.
    #[serde(rename = "urn:coreward:problem:bad-request")]
    BadRequest,
    /// No token, or one that is not valid.
    #[serde(rename = "urn:coreward:problem:unauthenticated")]
    Unauthenticated,
    /// The token's role may not do that.
    #[serde(rename = "urn:coreward:problem:forbidden")]
    Forbidden,
    /// There is no such thing.
    #[serde(rename = "urn:coreward:problem:not-found")]
    NotFound,
    /// The path knows other methods only.
    #[serde(rename = "urn:coreward:problem:method-not-allowed")]
    MethodNotAllowed,
    /// The request took too long.
    #[serde(rename = "urn:coreward:problem:timeout")]
    Timeout,
    /// The state of the controller is another than the request supposes.
    #[serde(rename = "urn:coreward:problem:conflict")]
    Conflict,
    /// The body is larger than this endpoint takes.
    #[serde(rename = "urn:coreward:problem:too-large")]
    TooLarge,
    /// The body is no JSON.
    #[serde(rename = "urn:coreward:problem:unsupported-media-type")]
    UnsupportedMediaType,
    /// A document in the request is wrong; `mistakes` says where.
    #[serde(rename = "urn:coreward:problem:wrong-document")]
    WrongDocument,
    /// More requests than this caller may send, or more watchers than there is room for; `Retry-After` says when to try
    /// again.
    #[serde(rename = "urn:coreward:problem:too-many-requests")]
    TooManyRequests,
    /// Of several controllers another one leads; `leader` and `leader_api` say which.
    #[serde(rename = "urn:coreward:problem:not-leading")]
    NotLeading,
    /// What is to be changed cannot be written down, as a disk that is full; everything is as it was.
    #[serde(rename = "urn:coreward:problem:not-stored")]
    NotStored,
    /// The controller's own fault.
    #[serde(rename = "urn:coreward:problem:internal")]
    Internal,
}

impl ProblemKind {
    fn status_and_title(self) -> (StatusCode, &'static str) {
        match self {
            Self::BadRequest => (StatusCode::BAD_REQUEST, "The request cannot be understood"),
            Self::Unauthenticated => (StatusCode::UNAUTHORIZED, "A token is needed"),
            Self::Forbidden => (StatusCode::FORBIDDEN, "This role may not do that"),
            Self::NotFound => (StatusCode::NOT_FOUND, "There is no such thing"),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, "The path knows other methods only"),
            Self::Timeout => (StatusCode::REQUEST_TIMEOUT, "The request took too long"),
            Self::Conflict => (StatusCode::CONFLICT, "The state is another one"),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "The body is too large"),
            Self::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "The body is no JSON"),
            Self::WrongDocument => (StatusCode::UNPROCESSABLE_ENTITY, "The document is wrong"),
            Self::TooManyRequests => (StatusCode::TOO_MANY_REQUESTS, "Too many requests"),
            Self::NotLeading => (StatusCode::SERVICE_UNAVAILABLE, "Another controller leads"),
            Self::NotStored => (StatusCode::INSUFFICIENT_STORAGE, "The change cannot be written down"),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "The controller failed"),
        }
    }
}

/// An error (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What kind of error it is.
    #[serde(rename = "type")]
    pub kind: ProblemKind,
    /// That in words.
    pub title: Box<str>,
    /// The status of the answer.
    pub status: u16,
    /// What was found, and what was expected.
    pub detail: String,
    /// What is wrong with a document, in the order of its lines (the first 100).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mistakes: Vec<DocumentMistake>,
    /// Seconds, as in `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u64>,
    /// Where daemons reach the controller that leads, where this one does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<Box<str>>,
    /// `https://HOST:PORT` of that one's API, where it listens beyond its own host: the same request is for there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uri")]
    pub leader_api: Option<Box<str>>,
}

/// Something in a document that is not as expected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DocumentMistake {
    /// What the request calls the document.
    pub file: String,
    /// Counted from 1; null: all of it.
    pub line: Option<u32>,
    /// Counted from 1, in characters.
    pub column: Option<u32>,
    /// Full name of the key, as `service.vip`; null where there is none (a syntax error).
    pub key: Option<String>,
    /// What was found.
    pub problem: String,
    /// What was expected instead, where one can say.
    pub expected: Option<String>,
    /// The valid name most like the one that was found.
    pub nearest: Option<String>,
    /// All of that in one line.
    pub message: String,
}

impl From<&Diagnostic> for DocumentMistake {
    fn from(mistake: &Diagnostic) -> Self {
        Self {
            file: mistake.file.display().to_string(),
            line: mistake.place.map(|place| place.line),
            column: mistake.place.map(|place| place.column),
            key: (!mistake.key.is_empty()).then(|| mistake.key.clone()),
            problem: mistake.problem.clone(),
            expected: mistake.expected.as_deref().map(str::to_owned),
            nearest: mistake.nearest.as_deref().map(str::to_owned),
            message: mistake.to_string(),
        }
    }
}

impl Problem {
    /// `detail`: what was found, and what was expected.
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

    /// There is no `what` of that name.
    pub fn not_found(what: &str, name: &str) -> Self {
        Self::new(ProblemKind::NotFound, format!("{what} {name:?} does not exist"))
    }

    /// The controller's own fault.
    pub fn internal(error: &anyhow::Error) -> Self {
        Self::new(ProblemKind::Internal, format!("{error:#}"))
    }

    /// To be tried again after so many seconds.
    pub fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after_s: Some(seconds), ..self }
    }
}

impl From<&Diagnostics> for Problem {
    fn from(mistakes: &Diagnostics) -> Self {
        let list = mistakes.list.iter().map(DocumentMistake::from).collect();
        Self { mistakes: list, ..Self::new(ProblemKind::WrongDocument, mistakes.to_string()) }
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
        let unauthenticated = self.kind == ProblemKind::Unauthenticated;
        let mut response = (status, Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if unauthenticated {
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

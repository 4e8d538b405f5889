"""Encryption of TCP connections."""

from __future__ import annotations

import ssl

from coli_server.errors import ConfigurationError
from coli_server.settings import Settings


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """What the settings ask for; None for plain connections. Raises ConfigurationError naming the file."""
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise ConfigurationError("COLI_TLS_KEY is given without COLI_TLS_CERT: both are needed")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Read certificate and key, again if need be: connections that come later use them."""
    assert settings.tls_cert is not None
    files = f"COLI_TLS_CERT is {settings.tls_cert!r}, COLI_TLS_KEY is {settings.tls_key or ''!r}"

    def no_password() -> str:
        raise ConfigurationError(f"{files}: the key is encrypted; nobody is here to give its password")

    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, no_password)
    except ssl.SSLError as error:
        raise ConfigurationError(f"{files}: not a certificate and its key in PEM: {error.reason}") from None
    except OSError as error:
        raise ConfigurationError(f"{files}: {error.strerror}") from None
